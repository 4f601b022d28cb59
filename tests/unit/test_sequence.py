"""The Python recorder keeps the conventions of the native one (tests/native/recorder_test.cpp)."""

from swapd.trace.sequence import SequenceRecorder, Storage
from swapd.trace.trace import READ, WRITE, Machine


def recorder(small: int = 10) -> SequenceRecorder:
    return SequenceRecorder(chunk_bytes=100, small_limit_bytes=small, machine=Machine(1.0, 2.0))


def call(
    r: SequenceRecorder, name: str, reads: list[Storage], makes: list[int], writes: tuple[Storage, ...] = ()
) -> list[Storage]:
    r.begin_function(name)
    for storage in reads:
        r.use(storage, READ)
    for storage in writes:
        r.use(storage, READ | WRITE)
    made = [Storage(size) for size in makes]
    for storage in made:
        r.allocate(storage)
    r.end_function(0.5)
    return made


def train(r: SequenceRecorder, weight: Storage) -> None:
    (x,) = call(r, "forward", [weight], [300])
    (gradient,) = call(r, "backward", [x, weight], [200])
    r.free(x)
    call(r, "update", [gradient], [], (weight,))
    r.free(gradient)


def test_the_steady_state():
    r = recorder()
    (weight,) = call(r, "make", [], [200])
    set_up = r.finish()
    assert (set_up.born.tolist(), set_up.died.tolist(), set_up.previous.tolist()) == ([0], [1], [-1])
    train(r, weight)
    first = r.finish()
    train(r, weight)
    second = r.finish()
    assert first.fingerprint == second.fingerprint != set_up.fingerprint
    assert second.function_names == ("forward", "backward", "update")
    assert second.function_start.tolist() == [0.0, 0.5, 1.0]
    assert second.variable_bytes.tolist() == [200, 300, 200]
    assert second.born.tolist() == [-1, 0, 1]
    assert second.died.tolist() == [3, 1, 2]
    assert second.previous.tolist() == first.previous.tolist() == [0, -1, -1]
    assert second.use_variables.tolist() == [0, 1, 1, 0, 2, 2, 0]
    assert second.use_flags.tolist() == [READ, WRITE, READ, READ, WRITE, READ, READ | WRITE]
    assert (second.chunk_bytes, second.machine) == (100, Machine(1.0, 2.0))


def test_one_storage_given_twice_is_one_use():
    r = recorder()
    (x,) = call(r, "make", [], [200])
    (y,) = call(r, "both", [x], [200], (x,))
    r.begin_function("written first")
    for flags in (READ | WRITE, READ):
        r.use(y, flags)
    r.end_function(0.0)
    trace = r.finish()
    assert trace.use_variables.tolist() == [0, 0, 1, 1]
    assert trace.use_flags.tolist() == [WRITE, READ | WRITE, WRITE, READ | WRITE]


def test_what_is_handed_on_changes_its_number():
    def step(r: SequenceRecorder, old: Storage, weight: Storage) -> Storage:
        call(r, "use", [weight, old], [])
        r.free(old)
        return call(r, "make", [], [300])[0]

    r = recorder()
    weight, old = call(r, "set up", [], [200, 300])
    r.finish()
    for _ in range(3):
        old = step(r, old, weight)
        trace = r.finish()
    assert trace.previous.tolist() == [0, 2, -1]
    assert (trace.born.tolist(), trace.died.tolist()) == ([-1, -1, 1], [2, 0, 2])


def test_two_buffers_in_turn_have_no_number_of_the_iteration_before():
    r = recorder()
    buffers = call(r, "set up", [], [200, 200])
    r.finish()
    traces = []
    for iteration in range(4):
        call(r, "use", [buffers[iteration % 2]], [])
        traces.append(r.finish())
    assert len({trace.fingerprint for trace in traces}) == 1
    assert [trace.previous.tolist() for trace in traces[1:]] == [[-1]] * 3


def test_what_is_freed_without_a_use_is_numbered_last():
    def step(r: SequenceRecorder, kept: Storage) -> Storage:
        call(r, "first", [], [])
        r.free(kept)
        return call(r, "second", [], [400])[0]

    r = recorder()
    (kept,) = call(r, "set up", [], [400])
    r.finish()
    for _ in range(3):
        kept = step(r, kept)
        trace = r.finish()
    assert trace.variable_bytes.tolist() == [400, 400]
    assert (trace.born.tolist(), trace.died.tolist()) == ([1, -1], [2, 0])
    assert trace.previous.tolist() == [-1, 0]


def test_small_storages_are_slabs_and_no_variables():
    r = recorder(small=1000)
    small = call(r, "make", [], [1000, 1, 1001])
    r.free(small[1])
    call(r, "use", small[:2], [])
    trace = r.finish()
    assert trace.variable_bytes.tolist() == [1001]
    assert trace.use_variables.tolist() == [0]
    assert trace.slab_chunks_peak == (1024 + 512) // 100 + 1
    call(r, "use", [small[0]], [])
    assert r.finish().slab_chunks_peak == 11, "what is still there counts, what was freed does not"


def test_dormant_bytes_are_those_no_function_uses():
    r = recorder()
    used, dormant = call(r, "make", [], [200, 700])
    assert r.finish().dormant_bytes == 0
    call(r, "use", [used], [])
    assert r.finish().dormant_bytes == 700
    r.free(dormant)
    call(r, "use", [used], [])
    assert r.finish().dormant_bytes == 0


def test_the_fingerprint_is_that_of_the_sequence_without_times_and_frees():
    def trace(name: str = "f", size: int = 300, free: bool = False, flags: int = READ) -> int:
        r = recorder()
        (x,) = call(r, "make", [], [size])
        r.begin_function(name)
        r.use(x, flags)
        r.end_function(1.0 if free else 2.0)
        if free:
            r.free(x)
        return r.finish().fingerprint

    same = trace()
    assert trace(free=True) == same
    assert len({same, trace(name="g"), trace(size=301), trace(flags=READ | WRITE)}) == 4
