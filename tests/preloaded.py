"""Import what the training scripts import, so that forks of the process need not: see forked.py."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import checkpoint  # noqa: E402, F401
import corpus  # noqa: E402, F401
import data  # noqa: E402, F401
import fp8  # noqa: E402, F401
import generation  # noqa: E402, F401
import hellaswag  # noqa: E402, F401
import lora  # noqa: E402, F401
import measure  # noqa: E402, F401
import plan  # noqa: E402, F401
import planning.batch_size_finder  # noqa: E402, F401
import resolve  # noqa: E402, F401
import runlog  # noqa: E402, F401
import settle  # noqa: E402, F401
