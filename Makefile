# make quickstart: from nothing to a sample of text, in FP8 numerics, on any machine
# make shakespeare: the same on Shakespeare's works, in verse; DATA_FILES=input.txt where there is no network
# make test:       the linter and the fast tests, set up the same way: two minutes on two cores
# make test-slow:  the tests that start processes, compile, install or kill: six minutes
# make drill:      random kills, stops and damages, full disks, strangers' files: three minutes
# make lint:       ruff, and tests/lint.py: pages' figures and names
# make install:    .venv with all requirements, Transformer Engine included where there is an NVIDIA GPU
PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
DATA_FILES ?=
BIN := .venv/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
WITHOUT_TE := 'Transformer Engine does not install here and is left out: native and torchao go without it'
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: quickstart shakespeare test test-slow drill lint install
quickstart: .venv/ready
	$(BIN)/python prepare_data.py stdlib
	$(BIN)/python train_fp8.py config/quickstart.py --resume=auto --checkpoint_dir=checkpoints_quickstart
	@echo; $(BIN)/python sample.py --ckpt=checkpoints_quickstart/latest.pt --prompt='def ' --max_new_tokens=400
	@echo; echo 'next: . .venv/bin/activate; python sample.py --ckpt=checkpoints_quickstart/latest.pt --prompt="import "'
	@echo '      python train.py config/quickstart.py                     the same run in bf16'
	@echo '      diff train.py train_fp8.py                               what FP8 takes'

shakespeare: .venv/ready
	$(BIN)/python prepare_data.py shakespeare --tokenizer=byte $(if $(DATA_FILES),--data_files='$(DATA_FILES)')
	$(BIN)/python train_fp8.py config/shakespeare_cpu.py --resume=auto --checkpoint_dir=checkpoints_shakespeare
	@echo; $(BIN)/python sample.py --ckpt=checkpoints_shakespeare/latest.pt --prompt='JULIET:' --max_new_tokens=300 --temperature=0.6

test: .venv/ready-dev lint
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' tests

test-slow: .venv/ready-dev
	$(BIN)/python -m pytest -q -n 2 -m slow tests

drill: .venv/ready-dev
	$(BIN)/python tests/drill.py

lint: .venv/bin/ruff
	$(BIN)/ruff check -q .
	$(BIN)/python tests/lint.py

install: .venv/ready
	$(PIP) pytest pytest-xdist pytest-timeout  # for tests/gpu
	$(if $(GPU),$(PIP) --no-build-isolation -r requirements-te.txt || echo $(WITHOUT_TE),@echo 'no NVIDIA GPU answers: Transformer Engine is left out')

# what the linter needs: no torch, so that it runs under any Python
.venv/bin/ruff: requirements-dev.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) ruff
	@touch $@

# TORCH:       torch's version, as torch==2.13.0, and any others; without it, the newest of requirements.txt
# TORCH_INDEX: where a build of torch for this machine is, such as a CPU's, without gigabytes of CUDA libraries
.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) $(or $(TORCH:%='%'),"$$(grep -o '^torch[^ ]*' requirements.txt)") --index-url $(TORCH_INDEX))
	$(PIP) -r requirements.txt $(TORCH:%='%')
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(PIP) -r requirements-dev.txt $(TORCH:%='%')
	@touch $@
