"""Import what the training scripts import, so that forks of the process need not: see forked.py."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch.distributed.checkpoint.state_dict  # noqa: F401

from fp8gpt import checkpoint  # noqa: F401
from fp8gpt import data  # noqa: F401
from fp8gpt import fp8  # noqa: F401
from fp8gpt.fp8 import health  # noqa: F401
import hellaswag  # noqa: F401
from fp8gpt import lora  # noqa: F401
import plan  # noqa: F401
from fp8gpt import batch_size_finder  # noqa: F401
from fp8gpt import run  # noqa: F401
from fp8gpt import runlog  # noqa: F401
