"""ResNet-50: He et al., "Deep residual learning for image recognition" (2016). The network is the example's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.models.steps import Step, classification

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resnet50.py"


def example() -> ModuleType:
    """examples/resnet50.py as a module."""
    name = "_example_resnet50"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def resnet50(batch: int, mode: str = "training", image: int = 224, classes: int = 1000) -> Step:
    return classification(example().ResNet50(classes), batch, mode, image, classes)
