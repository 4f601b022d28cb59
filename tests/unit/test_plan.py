import json

import numpy as np
import pytest

from swapd.planning.plan import In, Out, Plan, PlanError

PLAN = Plan(
    outs=(Out(3, 0, 5, -1), Out(4, 2, 1, 7)),
    ins=(In(3, 0, 5, 8, 2, 9),),
    write_backs=(Out(5, 1, 2, 3),),
    policy="idle",
    window_bytes=123,
    fingerprint=0xFEDCBA9876543210,
    chunk_bytes=2 << 20,
    capacity_chunks=100,
    predicted_seconds=0.1,
    bound_seconds=1 / 3,
)


def test_arrays_are_contiguous_columns():
    arrays = PLAN.to_arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "out_variable": [3, 4],
        "out_first_chunk": [0, 2],
        "out_chunk_count": [5, 1],
        "out_after_function": [-1, 7],
        "in_variable": [3],
        "in_first_chunk": [0],
        "in_chunk_count": [5],
        "in_after_function": [8],
        "in_after_outs": [2],
        "in_before_function": [9],
        "back_variable": [5],
        "back_first_chunk": [1],
        "back_chunk_count": [2],
        "back_after_function": [3],
    }
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays.values())


def test_an_empty_plan_has_empty_arrays():
    assert not Plan()
    assert all(array.shape == (0,) and array.dtype == np.int32 for array in Plan().to_arrays().values())
    assert len(Plan().to_arrays()) == 14


@pytest.mark.parametrize("plan", [PLAN, Plan()])
def test_round_trip(plan, tmp_path):
    path = tmp_path / "a.plan"
    plan.save(path)
    assert Plan.load(path) == plan
    assert list(tmp_path.iterdir()) == [path]


def test_truncated_files_are_errors(tmp_path):
    path = tmp_path / "a.plan"
    PLAN.save(path)
    content = path.read_bytes()
    for length in range(0, len(content) - 2, 5):
        path.write_bytes(content[:length])
        with pytest.raises(PlanError, match=r"a\.plan"):
            Plan.load(path)
    path.write_bytes(b"\xff" + content)
    with pytest.raises(PlanError, match="not a plan"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "other"}, "not a swapd-plan"),
        ({"version": 3}, "version 3"),
        ({"outs": [[1, 2, 3]]}, "damaged"),
        ({"ins": [[1, 2, 3, 4, 5, "6"]]}, "damaged"),
        ({"outs": [[1, 2, 3, 4.5]]}, "damaged"),
        ({"fingerprint": "?"}, "damaged"),
        ({"capacity_chunks": None}, "damaged"),
    ],
)
def test_damage_is_named(values, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **values}))


def test_a_missing_field_is_damage():
    fields = json.loads(PLAN.to_json())
    del fields["ins"]
    with pytest.raises(PlanError, match="'ins'"):
        Plan.from_json(json.dumps(fields))
