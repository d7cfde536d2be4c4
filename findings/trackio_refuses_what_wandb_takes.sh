#!/bin/bash
# trackio 0.43.0 calls itself a drop-in replacement, `import trackio as wandb`, compatible in init, log and finish. A script
# that resumes a run by its id, or that names tags, dir, mode, notes or entity, ends in a TypeError of init. There is no
# wandb.Error to catch and no define_metric. Figures that are logged in two calls for one step stay two rows; wandb joins
# them.
# Seen: six arguments refused by init, both names missing, two rows of step 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check trackio==0.43.0
cd "$folder"
TRACKIO_DIR=$folder/logs HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2> log <<'EOF' || { cat log; exit 1; }
import sys
import trackio as wandb
from trackio.sqlite_storage import SQLiteStorage

refused = []
for argument in 'id', 'tags', 'dir', 'mode', 'notes', 'entity':
    try:
        wandb.init(project='project', embed=False, **{argument: 'x'})
    except TypeError as error:
        print(error)
        refused.append(argument)
missing = [name for name in ('Error', 'define_metric') if not hasattr(wandb, name)]
print('missing:', missing)
wandb.init(project='project', name='run', embed=False, auto_log_gpu=False, auto_log_cpu=False)
wandb.log({'loss': 2.0}, step=1)
wandb.log({'tokens': 512}, step=1)
wandb.finish()
rows = [{name: value for name, value in row.items() if name != 'timestamp'}
        for row in SQLiteStorage.get_logs('project', 'run')]
print('rows:', rows)
sys.exit((len(refused), len(missing), len(rows)) != (6, 2, 2))
EOF
