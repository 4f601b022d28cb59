"""The results of parts are made where they belong in the whole result, or copied there, and bits are the same."""

from __future__ import annotations

from pathlib import Path

from processes import EMULATED, code, run_source
from splitting_runs import both

COMMON = """
    import torch
    import ooc

    torch.manual_seed(1)
    ooc_ops = torch.ops.ooc
    x, w = torch.randn(4, 8, 24, 24), torch.randn(16, 8, 3, 3)

    def call(x):
        return torch.nn.functional.conv2d(x, w, padding=1)

    def place(target, alike, function):
        ooc_ops.ranges(True)
        assert ooc_ops.place(target, alike)
        found = function()
        placed = ooc_ops.placed(found)
        ooc_ops.ranges(False)
        return placed, found

    with torch.no_grad():
        wanted = call(x[:2]).clone()
        whole = torch.full((4, 16, 24, 24), 7.0)
"""


def lines(folder: Path, source: str, **variables: str) -> list[str]:
    """What a program of the emulated device prints, in strict mode."""
    ended = run_source(folder, code(COMMON, source), **{**EMULATED, "OOC_STRICT": "1", **variables}).check()
    return ended.output.split()


def test_a_result_is_made_where_it_belongs_from_the_second_call_on(tmp_path: Path) -> None:
    found = lines(tmp_path, """
        with torch.no_grad():
            for turn in range(2):
                placed, made = place(whole[2:], 1, lambda: call(x[:2]))
                print(placed, bool((made == wanted).all()))
                print(bool((whole[2:] == wanted).all()), bool((whole[:2] == 7).all()))
            del made
            print(bool((whole[2:] == wanted).all()))
    """)
    assert found == ["False", "True", "False", "True", "True", "True", "True", "True", "True"]


def test_memory_that_is_away_comes_back_first(tmp_path: Path) -> None:
    """Both the neighbours of the result, and chunks that it shares with them."""
    found = lines(tmp_path, """
        core = ooc.pytorch._active().core
        with torch.no_grad():
            place(whole[1:3], 1, lambda: call(x[:2]))
            whole[1:3] = 5
            core.evict_all()
            placed, made = place(whole[1:3], 1, lambda: call(x[:2]))
            core.evict_all()
            print(placed, bool((whole[1:3] == wanted).all()), bool((whole[0] == 7).all()), bool((whole[3] == 7).all()))
    """)
    assert found == ["True"] * 4


def test_calls_that_allocate_otherwise_are_not_placed_and_write_nothing_there(tmp_path: Path) -> None:
    found = lines(tmp_path, """
        with torch.no_grad():
            place(whole[2:], 1, lambda: call(x[:2]))
            # Other allocations, and as large a result.
            placed, made = place(whole[2:], 1, lambda: torch.nn.functional.pad(call(x[:1]), (0, 0, 0, 0, 0, 16)))
            print(placed, bool((whole == 7).all()), made.shape[1])
            placed, made = place(whole[2:], 1, lambda: call(x[:2]))  # the one before is remembered now
            print(placed, bool((whole == 7).all()), bool((made == wanted).all()))
            print(place(whole[2:], 1, lambda: call(x[:2]))[0])
            placed, made = place(whole[:1], 1, lambda: call(x[:2]))  # another size
            print(placed, bool((made == wanted).all()), bool((whole[:1] == 7).all()))
    """)
    assert found == ["False", "True", "32", "False", "True", "True", "True", "False", "True", "True"]


def test_after_giving_up_nothing_is_placed(tmp_path: Path) -> None:
    found = lines(tmp_path, """
        with torch.no_grad():
            place(whole[2:], 1, lambda: call(x[:2]))
            assert ooc_ops.place(whole[2:], 1)
            ooc_ops.not_placed()  # as after an error
            made = call(x[:2])
            print(bool((made == wanted).all()), bool((whole == 7).all()))
    """)
    assert found == ["True"] * 2


def test_only_the_first_part_is_copied(tmp_path: Path) -> None:
    """Forward, and to the data; parts of channels do not lie together."""
    found = lines(tmp_path, """
        from torch.profiler import ProfilerActivity, profile
        from ooc.pytorch.splitting.calls import Call
        from ooc.pytorch.splitting.kernels import CPU, kernels_of

        def copies(function):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                function()
            return sum(event.count for event in seen.key_averages() if event.key == "aten::copy_")

        rest = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        forward = Call("aten::convolution", (x, w, None, *rest), {})
        backward = Call("aten::convolution_backward", (call(x), x, w, None, *rest, [True, False, False]), {})
        ooc_ops.ranges(True)
        with torch.no_grad():
            for each in (forward, backward):
                (kernel,) = kernels_of(each)
                whole = kernel.run([(4, CPU["own"])])[0]
                again = None
                for turn in range(2):
                    print(copies(lambda: globals().update(again=kernel.run([(1, CPU["own"])] * 4)[0])))
                    print(bool((again - whole).abs().max() < 2e-6 * whole.abs().max()))
            print(copies(lambda: CPU["own in 2"].run(**kernel.named)) > 0)
    """)
    assert found == ["1", "True", "0", "True", "1", "True", "0", "True", "True"]


def test_parts_in_the_adapter_have_the_bits_of_parts_in_python(tmp_path: Path) -> None:
    """Unequal parts; gradients that are broadcast, and images whose channels lie last; sums with and without a bias."""
    found = lines(tmp_path, """
        from ooc.pytorch.splitting.calls import Call
        from ooc.pytorch.splitting.kernels import CPU, MicroBatches, kernels_of

        bias, rest = torch.randn(16), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        last = x.to(memory_format=torch.channels_last)
        ooc_ops.ranges(True)
        with torch.no_grad():
            y = call(x)
            calls = [Call("aten::convolution", (given, w, bias, *rest), {}) for given in (x, last)]
            for grad in (y, y[:1, :1, :1, :1].expand(y.shape)):
                for asked in ([True, True, True], [False, True, False]):
                    calls.append(Call("aten::convolution_backward", (grad, x, w, [16], *rest, asked), {}))
            for kernel in (kernel for each in calls for kernel in kernels_of(each)):
                parts = MicroBatches(kernel, [(size, CPU["own"]) for size in (1, 2, 1)])
                assert parts._native is not None
                whole = kernel.run([(4, CPU["own"])])
                for turn in range(2):
                    found = parts(kernel.named)
                    native, parts._native = parts._native, None
                    wanted, parts._native = parts(kernel.named), native
                    for one, other, at_once in zip(found, wanted, whole):
                        assert (one is None) == (other is None) == (at_once is None)
                        if one is None:
                            continue
                        assert torch.equal(one, other) and one.stride() == other.stride() == at_once.stride()
                        assert (one - at_once).abs().max() <= 1e-4 * at_once.abs().max()
            print("compared")
    """)
    assert found == ["compared"]


def test_after_an_error_in_the_adapter_nothing_is_placed(tmp_path: Path) -> None:
    found = lines(tmp_path, """
        given = [2, 2], 0, 5, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ooc_ops.ranges(True)
        with torch.no_grad():
            wanted = call(x[2:]).clone()
            ooc_ops.convolution_in_parts(whole, *given)
            kept = whole.clone()
            try:
                ooc_ops.convolution_in_parts(whole, *given[:4], w[:, :5], *given[5:])  # filters of other channels
            except RuntimeError as error:
                print("channels" in str(error))
            made = call(x[2:])
            print(bool((made == wanted).all()), bool((whole == kept).all()))
    """)
    assert found == ["True"] * 3


def test_parts_of_convolutions_are_placed_and_have_the_same_bits(tmp_path: Path) -> None:
    """Budget 512 KiB, results of 1 MiB: by samples, which lie together, and by rows, which do not."""
    ended = both(tmp_path, """
        x, w = torch.randn(16, 8, 32, 32), torch.randn(16, 8, 3, 3)
        for turn in range(2):
            show("made", torch.nn.functional.conv2d(x, w, padding=1))
    """)
    assert [layer["operator"] for layer in ended.figures["split_layers"]] == ["aten::convolution"]
