"""Import what the training scripts import, so that forks of the process need not: see forked.py."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import checkpoint  # noqa: F401
import corpus  # noqa: F401
import data  # noqa: F401
import fp8  # noqa: F401
import hellaswag  # noqa: F401
import lora  # noqa: F401
import measure  # noqa: F401
import plan  # noqa: F401
import planning.batch_size_finder  # noqa: F401
import resolve  # noqa: F401
import runlog  # noqa: F401
import settle  # noqa: F401
