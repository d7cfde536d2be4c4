#!/bin/bash
# tensorboard 2.21.0 (tensorboard-data-server 0.7.2, written by tensorboardX 2.6.5): a writer that is opened with
# purge_step=3 marks steps 3 and later of earlier files as abandoned. The Python reader, EventAccumulator, drops them.
# The page's server takes no notice of the mark: it drops earlier points only from the next written step on. So after a
# resume at step 2 that logs more rarely than before, the abandoned point of step 3 stays in the curve.
# Seen: of 1 2 3 5, then 4 with purge_step=3, the reader gives 1 2 4, the page's HTTP answer 1 2 3 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $server 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install -q --disable-pip-version-check tensorboard==2.21.0 tensorboardX==2.6.5 \
    tensorboard-data-server==0.7.2 'setuptools<81' numpy==2.3.5
"$python" - "$folder/runs" <<'EOF'
import sys, time
from tensorboardX import SummaryWriter
first = SummaryWriter(sys.argv[1])
for step in (1, 2, 3, 5):
    first.add_scalar('loss', 10 - step, step)
first.close()
time.sleep(2)       # the second file's name is of a later second
second = SummaryWriter(sys.argv[1], purge_step=3)
second.add_scalar('loss', 6.5, 4)
second.close()
EOF
port=$("$python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
"$folder/venv/bin/tensorboard" --logdir "$folder/runs" --port "$port" --host 127.0.0.1 >"$folder/log" 2>&1 &
server=$!
"$python" - "$folder/runs" "$port" <<'EOF'
import json, sys, time, urllib.request
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
reader = EventAccumulator(sys.argv[1])
reader.Reload()
read = [event.step for event in reader.Scalars('loss')]
shown = []
for _ in range(60):
    time.sleep(1)
    try:
        url = f'http://127.0.0.1:{sys.argv[2]}/data/plugin/scalars/scalars?run=.&tag=loss'
        shown = [step for _, step, _ in json.load(urllib.request.urlopen(url))]
        if 4 in shown:
            break
    except OSError:
        pass
print('EventAccumulator:', *read)
print('the page:        ', *shown)
sys.exit((read, sorted(shown)) != ([1, 2, 4], [1, 2, 3, 4]))
EOF
