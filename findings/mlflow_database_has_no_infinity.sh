#!/usr/bin/env bash
# The database store of MLflow 3.17.2 has no infinity and no NaN. An infinite metric comes back from
# `get_metric_history` as 1.7976931348623157e+308, the largest float, which is finite: a check for
# `inf` of the gradient norm of a diverged run finds nothing. NaN comes back as NaN, but who reads
# the table itself finds 0.0, unless they also read the column `is_nan`.
#
# Output seen (2026-11-28, CPython 3.11): the two lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 sqlparse==0.6.1
cat > "$folder/store.py" <<'PYTHON'
import math
import sqlite3
import sys

from mlflow import MlflowClient

path = f"{sys.argv[1]}/store.db"
client = MlflowClient(f"sqlite:///{path}")
run = client.create_run("0").info.run_id
for step, value in enumerate([0.5, math.nan, math.inf]):
    client.log_metric(run, "grad_norm", value, step=step)
history = sorted(client.get_metric_history(run, "grad_norm"), key=lambda metric: metric.step)
print("returned", [metric.value for metric in history])
rows = sqlite3.connect(path).execute("select value, is_nan from metrics order by step")
print("value, is_nan", rows.fetchall())
PYTHON
"$folder/venv/bin/python" "$folder/store.py" "$folder" > "$folder/seen"
cat > "$folder/EXPECTED" <<'TEXT'
returned [0.5, nan, 1.7976931348623157e+308]
value, is_nan [(0.5, 0), (0.0, 1), (1.7976931348623157e+308, 0)]
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: MLflow 3.17.2 stores infinity as the largest float, and NaN as 0"
