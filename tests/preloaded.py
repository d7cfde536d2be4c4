"""Import what the training scripts import, so that forks of the process need not: see forked.py."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch.distributed.checkpoint.state_dict  # noqa: F401

from fp8gpt import batch_size_finder, checkpoint, data, fp8, lora, run, runlog  # noqa: F401
from fp8gpt.fp8 import health  # noqa: F401
import hellaswag  # noqa: F401
import plan  # noqa: F401
