"""The former name of `ooc.pytorch`, for programs that run in a checkout. A wheel installs the new name alone."""

import sys

from ooc import pytorch

sys.modules[__name__] = pytorch
