"""What is split, what runs on host memory, what raises, and what each of them says."""

from __future__ import annotations

from pathlib import Path

from processes import run_source
from splitting_runs import COMMON, both, code, out_of_core

ON_HOST = """
    made = torch.randn(509, 1041)
    rows, columns = torch.arange(509)[:, None], torch.arange(1041).flip(0)
    show("index", made[rows, columns])
    show("rot90", made.rot90())
    show("index", made[rows, columns])
"""


def test_what_cannot_be_split_runs_on_host_memory(tmp_path: Path) -> None:
    figures = both(tmp_path, ON_HOST).figures
    layers = {layer["operator"]: layer for layer in figures["split_layers"] if layer["how"] == "host-backed"}
    assert layers["aten::index.Tensor"]["calls"] == 2 and layers["aten::index.Tensor"]["exact"]
    assert layers["aten::rot90"]["shapes"] == "Float[509x1041]"
    assert figures["host_backed_function_count"] == sum(layer["calls"] for layer in layers.values()) >= 3


def test_random_operators_that_run_twice_draw_once(tmp_path: Path) -> None:
    """The kernel has drawn its mask when its result turns out not to fit."""
    source = """
        own = torch.Generator().manual_seed(3)
        for size in (300, 350, 400, 450):
            made = torch.randn(size, 256)
            result, mask = torch.native_dropout(made, 0.5, True)
            show("dropout", result)
            show("mask", mask)
            show("multinomial", torch.multinomial(made.abs(), 200, True))
            show("own", torch.bernoulli(made.abs().clamp(0, 1), generator=own))
            print(torch.rand(3), torch.rand(3, generator=own))
    """
    both(tmp_path, source)


def test_off_raises(tmp_path: Path) -> None:
    source = """
        made = torch.ones(200, 512)
        try:
            made + made
        except torch.OutOfMemoryError as error:
            print(error)
        try:
            torch.ones(512, 1024)
        except torch.OutOfMemoryError as error:
            print(error)
        print(made.sum().item())
    """
    ended = out_of_core(tmp_path, source, OOC_SPLIT="off").check()
    add, ones, total = ended.output.splitlines()
    assert "aten::add.Tensor needs" in add and "OOC_BUDGET=" in add and "parts" not in add
    assert "aten::ones needs" in ones and total == "102400.0"
    figures = ended.figures
    assert figures["split"] == "off" and figures["split_layers"] == []
    assert (figures["split_function_count"], figures["host_backed_function_count"]) == (0, 0)


def test_a_part_that_does_not_fit_is_not_divided_again(tmp_path: Path) -> None:
    """What is pinned leaves no room: the error comes after some tries, not after each of them on each of six levels."""
    source = """
        from ooc.pytorch.splitting import runtime

        matrix = torch.ones(2048, 16)
        pinned = torch.zeros(124 << 10).numpy()
        tries, ordinary = 0, runtime.Runtime.run

        def run(*arguments):
            global tries
            tries += 1
            assert tries < 50, "too many tries"
            return ordinary(*arguments)

        runtime.Runtime.run = run
        try:
            matrix @ matrix[0]
        except torch.OutOfMemoryError as error:
            print(error)
    """
    ended = out_of_core(tmp_path, source).check()
    assert "aten::mv needs" in ended.output and "OOC_BUDGET=" in ended.output


def test_what_ran_in_parts_and_does_no_more_names_its_need(tmp_path: Path) -> None:
    source = """
        matrix = torch.ones(384, 512)  # of less than 1 MiB, so that the verdict is waited for
        print((matrix @ matrix[0]).sum().item())
        pinned = torch.zeros(124 << 10).numpy()
        try:
            matrix @ matrix[0]
        except torch.OutOfMemoryError as error:
            print(error)
        del pinned
        print((matrix @ matrix[0]).sum().item())
    """
    first, error, last = out_of_core(tmp_path, source).check().output.splitlines()
    assert first == last == str(384 * 512.0)
    assert error.startswith("function aten::mv needs") and "OOC_BUDGET=" in error and "in parts" in error


def test_nothing_changes_where_everything_fits(tmp_path: Path) -> None:
    source = """
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 100))
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.randn(32, 100)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        print([digest(value) for value in model.parameters()])
    """
    figures = []
    for mode in ("off", "exact"):
        variables = {"OOC_BUDGET": "256KiB", "OOC_SPLIT": mode, "OOC_SMALL_LIMIT": "1KiB"}
        figures.append(both(tmp_path, source, **variables).figures)
    off, exact = figures
    assert (off["split"], exact["split"]) == ("off", "exact")
    for each in figures:
        assert (each["split_function_count"], each["split_part_count"], each["split_layers"]) == (0, 0, [])
        assert each["host_backed_function_count"] == 0 and each["swap_in_bytes"] > 0
    assert off["functions"] == exact["functions"] and off["min_budget_bytes"] == exact["min_budget_bytes"]
    assert not (tmp_path / "store.sqlite").exists()


def test_products_are_never_run_on_host_memory(tmp_path: Path) -> None:
    source = """
        made = torch.ones(300_000)
        try:
            made.dot(made)
        except torch.OutOfMemoryError as error:
            print(error)
    """
    ended = out_of_core(tmp_path, source).check()
    assert "aten::dot needs" in ended.output and "no way to run it in parts" in ended.output
    assert ended.figures["host_backed_function_count"] == 0


# A division of a sum changes its rounding; nothing else in the project divides this operator.
DOT = """
    import sys
    from ooc.pytorch.splitting import registry
    from ooc.pytorch.splitting.calls import Split

    @registry.handler("aten::dot")
    def dot(context, left, right):
        def run(left, right):
            return sum(torch.dot(a, b) for a, b in zip(left.split(10_000), right.split(10_000), strict=True))

        return context.choose("", [Split("partial sums", 30, run)], torch.ops.aten.dot.default).run(left, right)

    one, other = torch.randn(300_000), torch.randn(300_000)
    try:
        print(one.dot(other).item(), one.dot(other).item())
    except torch.OutOfMemoryError as error:
        print(error)
"""


def test_exact_refuses_what_allow_takes(tmp_path: Path) -> None:
    exact = out_of_core(tmp_path, DOT, OOC_SPLIT="exact").check()
    assert "partial sums" in exact.output and "OOC_SPLIT=allow" in exact.output and "aten::dot needs" in exact.output
    assert exact.figures["split"] == "exact"
    assert "aten::dot" not in {layer["operator"] for layer in exact.figures["split_layers"]}

    allow = out_of_core(tmp_path, DOT, OOC_SPLIT="allow").check()
    plain = run_source(
        tmp_path, code(COMMON, DOT.replace("@registry.handler", "registry.handler")), OOC_ALLOC="0"
    ).check()
    first, second = map(float, allow.output.split())
    expected = float(plain.output.split()[0])
    assert first == second and abs(first - expected) < 1e-3 * abs(expected)
    (layer,) = [layer for layer in allow.figures["split_layers"] if layer["operator"] == "aten::dot"]
    assert (layer["exact"], layer["parts"], layer["how"], layer["calls"]) == (False, 30, "partial sums", 2)
    assert 0 < layer["largest_difference"] < 0.1 and 0 < layer["largest_relative"] < 1e-3


WRONG = DOT.replace("return sum(", "return 0.9 * sum(")


def test_a_wrong_division_is_never_taken(tmp_path: Path) -> None:
    """Not even by `allow`: what differs by a tenth is not rounding."""
    ended = out_of_core(tmp_path, WRONG, OOC_SPLIT="allow").check()
    assert "the result differs by" in ended.output and "aten::dot needs" in ended.output


def test_what_may_have_been_written_is_not_run_again(tmp_path: Path) -> None:
    """An operator in place whose kernel has begun: it raises, and the program goes on."""
    source = """
        made, doubles = torch.ones(32, 1024), torch.ones(32, 1024, dtype=torch.float64)
        try:
            made.add_(doubles)
        except torch.OutOfMemoryError as error:
            print(error)
        print(made.sum().item(), doubles.sum().item(), made.add_(1).sum().item())
    """
    ended = out_of_core(tmp_path, source).check()
    error, sums = ended.output.splitlines()
    assert "aten::add_.Tensor needs" in error
    assert sums == "32768.0 32768.0 65536.0"


def test_an_operator_in_place_is_not_begun_again_with_smaller_parts(tmp_path: Path) -> None:
    """Its first parts are written when another one finds no memory."""
    source = """
        from ooc.pytorch.splitting import registry

        @registry.handler("aten::lgamma_")
        def lgamma_(context, made):
            made[:1].add_(1)
            raise torch.OutOfMemoryError("planted")

        made = torch.ones(300_000)
        try:
            made.lgamma_()
        except torch.OutOfMemoryError as error:
            print(error)
        print(made[:2].tolist())
    """
    ended = out_of_core(tmp_path, source).check()
    assert ended.output.splitlines() == ["planted", "[2.0, 1.0]"]


def test_an_error_of_a_handler_is_seen(tmp_path: Path) -> None:
    """After an operator that refused to run in parts, too."""
    raising = "if len(left) < 300_000:\n            raise ValueError('planted')\n\n        def run(left, right):"
    source = DOT.replace("def run(left, right):", raising) + "    one[1:].dot(other[1:])\n"
    ended = out_of_core(tmp_path, source)
    assert "OOC_SPLIT=allow" in ended.output
    assert ended.status != 0 and "ValueError: planted" in ended.errors


def test_memory_reached_without_pytorch(tmp_path: Path) -> None:
    source = """
        import numpy
        made = torch.randn(300, 1024)
        for reach in (made.numpy, made.data_ptr, made[:3].numpy, lambda: numpy.asarray(made)):
            try:
                reach()
                print("reached")
            except torch.OutOfMemoryError as error:
                print("of it on the device: give it copies of parts" in str(error))
        print(made[2:5].clone().numpy().tolist() == made[2:5].tolist(), made[0].tolist() == made[0].clone().tolist())
    """
    ended = out_of_core(tmp_path, source).check()
    assert ended.output.split() == ["True"] * 6


def test_a_single_number_may_be_away(tmp_path: Path) -> None:
    """The type of a result depends on it; PyTorch's own rule for `complex` reads it to find that out."""
    source = """
        number, parts = torch.randn(()), torch.randn(2, 200_000)
        import os
        if os.environ["OOC_ALLOC"] != "0":
            import ooc.pytorch
            parts.add_(0)  # a function that does not hold the number
            ooc.pytorch._active().core.evict_all()
        show("complex", torch.complex(parts[0], number))
        show("times", parts * 3 + parts * number)
    """
    figures = both(tmp_path, source, OOC_SMALL_LIMIT="1").figures
    assert {layer["operator"] for layer in figures["split_layers"]} > {"aten::complex"}


def test_parts_become_smaller_with_the_budget(tmp_path: Path) -> None:
    """What a part may take was found out under a larger budget; an operator that writes in place is not begun twice."""
    source = """
        import os
        made = torch.randn(250_000)
        for budget in (1 << 20, 256 << 10, 128 << 10, 1 << 20):
            if os.environ["OOC_ALLOC"] != "0":
                import ooc.pytorch
                ooc.pytorch._active().core.set_budget(budget)
            show("divided", made.div_(1.25))
    """
    figures = both(tmp_path, source, OOC_BUDGET="1MiB").figures
    (layer, *others) = (layer for layer in figures["split_layers"] if layer["operator"] == "aten::div_.Tensor")
    assert others and all(each["parts"] != layer["parts"] for each in others)


def test_an_operator_that_fills_a_given_result_begins_again(tmp_path: Path) -> None:
    """What it needs beside its arguments turns out within it: a copy of the numbers in another type."""
    source = """
        made = torch.randn(500, 400) > 0
        out = torch.empty(500, dtype=torch.int64)
        show("sum", torch.sum(made, 1, out=out))
    """
    figures = both(tmp_path, source).figures
    assert "aten::sum.IntList_out" in {layer["operator"] for layer in figures["split_layers"]}


def test_an_operator_that_fills_one_of_its_operands_does_not_begin_again(tmp_path: Path) -> None:
    source = """
        memory = torch.zeros(204_000, dtype=torch.uint8)
        try:
            torch.sum(memory[4000:].view(torch.bool).view(500, 400), 1, out=memory[:4000].view(torch.int64))
        except torch.OutOfMemoryError as error:
            print(error)
    """
    assert "aten::sum.IntList_out needs" in out_of_core(tmp_path, source).check().output


def test_operators_that_read_the_memory_around_a_view(tmp_path: Path) -> None:
    """The kernels copy the whole storage of a view, so the ranges that the view reaches are not enough."""
    source = """
        made, other, numbers = torch.randn(200, 512), torch.randn(90_000), torch.randn(60)
        view = made[100:160]
        operators = {
            "select": lambda: torch.select_scatter(view, numbers, 1, 3),
            "slice": lambda: torch.slice_scatter(view, numbers[:, None].expand(60, 2), 1, 3, 5),
            "diagonal": lambda: torch.diagonal_scatter(view, numbers),
            "as_strided": lambda: torch.as_strided_scatter(view, torch.ones(60, 4), (60, 4), (512, 1), 0),
            "copy": lambda: torch.as_strided_copy(view, (190, 300), (512, 1), 0),
        }
        for name, operator in operators.items():
            other.add_(1)
            show(name, operator())
    """
    both(tmp_path, source, OOC_BUDGET="640KiB")
