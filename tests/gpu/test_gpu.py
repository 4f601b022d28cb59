"""PyTorch on an NVIDIA GPU with the allocator: the same bits as in-core, within the budget (`make test-gpu`).

unittest and nothing else, as a machine with a GPU may have no more than PyTorch:

    PYTHONPATH=.:integrations python tests/gpu/test_gpu.py -v
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import unittest
from concurrent.futures import Future
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(HERE)]

import torch  # noqa: E402
from compare import compare  # noqa: E402
from processes import PATHS, Ended, after, start  # noqa: E402

MODELS = ("resnet50", "gpt2", "llama", "unet")
# Programs of tests/frameworks that make sense where tensors are on the GPU.
PROGRAMS = (
    "adamw_foreach", "changing_shapes", "checkpointing", "complex_tensors", "densenet", "hf_bert", "hf_gpt2",
    "hf_llama", "hf_t5", "in_place", "inference", "lstm", "sparse_gradients", "torch_func", "train_validate",
    "two_optimizers",
)  # fmt: skip
ACTIVATE = """
import os
if os.environ.get("OOC_ALLOC"):
    from ooc_alloc.autoload import activate
    activate()
"""
folder = Path(tempfile.mkdtemp(prefix="ooc-test-gpu-"))


def checks(path: Path) -> list[str]:
    bodies = re.findall(r"^def (\w+)\(\) -> None:\n((?:    .*\n|\n)+)", path.read_text(), re.MULTILINE)
    return [name for name, body in bodies if re.search(r"^    start\(", body, re.MULTILINE)]


def out_of_core(budget: int, **more: str) -> dict[str, str]:
    return {"OOC_ALLOC": "cuda", "OOC_BUDGET": str(budget), **more}


def loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


class Runs:
    """All processes, started before the first test waits for one."""

    def __init__(self) -> None:
        # The entry point of `import torch` needs an installed package: a checkout turns the allocator on by hand.
        (folder / "sitecustomize.py").write_text(ACTIVATE)
        self.path = {"PYTHONPATH": f"{PATHS}{os.pathsep}{folder}", "OOC_STRICT": "0"}
        self.models = {name: self.model(name) for name in MODELS}
        self.programs = {name: self.program(name) for name in PROGRAMS}
        larger = {"OOC_CHECK_UNIT": str(32 << 20), "OOC_CHECK_DEVICE": "gpu"}
        shared = ROOT / "tests" / "cuda_build" / "checks.py"
        self.shared = {name: start([str(shared), name], larger) for name in checks(shared)}
        kernels = HERE / "kernels.py"
        self.kernels = {name: start([str(kernels), name], {}) for name in checks(kernels)}

    def plain(self, name: str, way: str) -> Future[Ended]:
        """The program without the allocator; its results have the way in their name."""
        results = str(folder / f"{name}-{way}.pt")
        model = [str(HERE / "model.py"), name, results]
        return start(model if name in MODELS else [*self.command(name), results], {})

    def command(self, name: str) -> list[str]:
        return [str(HERE / "on_cuda.py"), str(ROOT / "tests" / "frameworks" / "programs" / f"{name}.py"), "--save"]

    def model(self, name: str) -> Future[Any]:
        def small(ended: Ended) -> dict[int, Future[Ended]]:
            peak = json.loads(ended.output.splitlines()[-1])["peak_bytes"]
            runs = {}
            for factor in (2, 4):
                results, summary = folder / f"{name}-{factor}.pt", folder / f"{name}-{factor}.json"
                variables = {**self.path, **out_of_core(peak // factor)}
                runs[factor] = start([str(HERE / "model.py"), name, str(results)], variables, summary)
            return runs

        return after(self.plain(name, "plain"), small)

    def program(self, name: str) -> tuple[Future[Ended], Future[Ended]]:
        variables = {**self.path, **out_of_core(160 << 20)}
        small = [*self.command(name), str(folder / f"{name}-small.pt")]
        return self.plain(name, "plain"), start(small, variables, folder / f"{name}.json")


runs: Runs


def setUpModule() -> None:
    global runs
    if not torch.cuda.is_available():
        raise unittest.SkipTest("PyTorch sees no GPU")
    from ooc.pytorch import build

    build.build()  # once, before sixty processes want it
    runs = Runs()


def tearDownModule() -> None:
    shutil.rmtree(folder, ignore_errors=True)


class Bits(unittest.TestCase):
    def identical(self, name: str, way: str) -> None:
        """Every bit is that of the plain program, but for what the plain program itself does not repeat."""
        plain = loaded(folder / f"{name}-plain.pt")
        report = compare(plain, loaded(folder / f"{name}-{way}.pt"))
        self.assertGreater(report["tensors"], 0)
        differences = report["differences"]
        for again in ("again", "once more") if differences else ():
            runs.plain(name, again).result().check()
            unsteady = compare(plain, loaded(folder / f"{name}-{again}.pt"))["differences"]
            differences = {path: how for path, how in differences.items() if path not in unsteady}
            if unsteady:
                print(f"{name}: plain PyTorch differs from itself in {sorted(unsteady)}", flush=True)
        self.assertEqual(differences, {})

    def within_budget(self, ended: Ended) -> dict[str, Any]:
        figures = ended.check().summary
        self.assertIsNotNone(figures, f"the allocator was off: {ended.errors[-2000:]}")
        assert figures is not None
        self.assertNotEqual(figures["device"], "emulated")
        self.assertLessEqual(figures["device_peak_bytes"], figures["budget_bytes"])
        self.assertEqual(figures["driver_failure_count"], 0)
        return figures

    def test_models(self) -> None:
        for name in MODELS:
            for factor in (2, 4):
                with self.subTest(model=name, oversubscription=factor):
                    ended = runs.models[name].result()[factor].result()
                    figures = self.within_budget(ended)
                    self.assertGreater(figures["swap_in_bytes"], 0)
                    self.identical(name, str(factor))

    def test_programs(self) -> None:
        for name, (plain, small) in runs.programs.items():
            with self.subTest(program=name):
                if plain.result().status != 0:  # it needs a package that is not here, or is not meant for a GPU
                    self.skipTest(
                        f"does not run in plain PyTorch here: {plain.result().errors.strip().splitlines()[-1]}"
                    )
                self.within_budget(small.result())
                self.identical(name, "small")


class Memory(unittest.TestCase):
    def test_without_kernels(self) -> None:
        for name, run in runs.shared.items():
            with self.subTest(check=name):
                self.assertTrue(run.result().check().output.endswith("done\n"))

    def test_kernels(self) -> None:
        for name, run in runs.kernels.items():
            with self.subTest(check=name):
                self.assertTrue(run.result().check().output.endswith("done\n"))

    def test_compute_sanitizer(self) -> None:
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            self.skipTest("compute-sanitizer is not on the PATH")
        import subprocess

        command = [tool, "--error-exitcode", "9", sys.executable, str(HERE / "kernels.py"), "workspaces"]
        variables = {**os.environ, "PYTHONPATH": PATHS}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150, check=False)
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-4000:])


if __name__ == "__main__":
    unittest.main(verbosity=2)
