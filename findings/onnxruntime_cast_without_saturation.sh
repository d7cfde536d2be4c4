#!/bin/bash
# onnxruntime 1.32.0, CPU, onnx 1.23.2: Cast to FP8 with saturate=0 treats values beyond the range by no one rule.
# To FLOAT8E4M3FN, 465 to 479 become NaN, 480 to 495 become 448, 496 NaN again. To FLOAT8E5M2, which has infinity,
# 61,440 to 65,535 become NaN and larger values infinity. onnx's own ReferenceEvaluator, on the same model, gives NaN
# for all of the former and infinity for all of the latter.
# Seen: nan nan 448 448 nan; nan nan inf inf. The reference: nan five times; inf four times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

cases = {'FLOAT8E4M3FN': [465, 479, 480, 495, 496], 'FLOAT8E5M2': [61440, 65535, 65536, 1e6]}
found = []
for kind, values in cases.items():
    nodes = [helper.make_node('Cast', ['x'], ['y'], to=getattr(TensorProto, kind), saturate=0),
             helper.make_node('Cast', ['y'], ['z'], to=TensorProto.FLOAT)]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [None])] for name in 'xz']
    graph = helper.make_graph(nodes, 'cast', *ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 19)], ir_version=9)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    for name, runs in ('onnxruntime', session), ('reference', ReferenceEvaluator(model)):
        cast, = runs.run(None, {'x': np.array(values, np.float32)})
        print(kind, name, dict(zip(values, cast.tolist())))
        found.append(' '.join(map(str, cast.tolist())))
expected = ['nan nan 448.0 448.0 nan', 'nan nan nan nan nan', 'nan nan inf inf', 'inf inf inf inf']
sys.exit(found != expected)
EOF
