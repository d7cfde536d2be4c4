"""The README's commands, in the order given, in one fresh folder: a reader who pastes them meets no error.

Each is made small by SMALL, or left out for the reason that LEFT_OUT gives; a new command runs as it stands.
A block of output is marked as one: ```text, or ```console with `$ ` before its commands.
"""
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed.run as launcher

import bench
import hf
import plan
import plot
from configurator import SettingError, configure
from conftest import ROOT, run
from preparing import parquet
from test_finetune import save_llama
from tokenizers_made import CHATML

PAGE = (ROOT / 'README.md').read_text()
PAGES = sorted((ROOT / 'docs').glob('*.md'))
UNTRACKED = shutil.ignore_patterns('.*', '__pycache__', 'data', 'runs', 'sweeps', 'checkpoints*')

# how a command begins: why it is left out
LEFT_OUT = {
    '. .venv/bin/activate': 'the Python that runs the test is taken',
    'pip install ': 'the requirements of the tests have it',
    'make install': 'it installs packages: test_install.py has it',
    'make test': 'it is what runs this',
}
SHAPE = '--n_layer=1 --n_head=2 --n_embd=32 --tokenizer=byte --block_size=64 --batch_size=2'
STEPS = '--max_steps=2 --warmup_steps=0 --total_batch_size=0 --target_effective_batch_size=0 '
STEPS += '--eval_tokens=256 --hellaswag_freq=0 --num_workers=0 --compile_model=off'
OF_TEXTS = "--tokenizer=byte --val_fraction=0.2 --data_files='texts/*.parquet'"
# what stands in a command: what is put behind it, of all rows that fit
SMALL = {
    r'prepare_data.py shakespeare': OF_TEXTS,
    r'train(_fp8)?.py ': STEPS,
    r'train(_fp8)?.py config/': SHAPE,
    r'train_fp8.py --init_from': '--block_size=256',
    r'sample.py': '--max_new_tokens=9',
}
# models that the reader fetches: the folder of a tiny one
MODELS = {'HuggingFaceTB/SmolLM2-135M-Instruct': 'llama'}


def spans(page):
    """The words of each command of Python that stands in a line of the page's text or tables."""
    text = re.sub(r'^```.*?^```$', '', page, flags=re.S | re.M)
    found = re.findall(r'`(python \w+\.py [^`]*)`', text)
    return [shlex.split(span.replace(' CONFIG', ' config/gpt2_fp8.py')) for span in found]


def commands(page):
    """The words of each command in a page's blocks, comments aside."""
    for kind, block in re.findall(r'^```(\w*)\n(.*?)^```$', page, re.S | re.M):
        lines = block.replace('\\\n', ' ').splitlines()
        if kind == 'console':
            lines = [line.removeprefix('$ ') for line in lines if line.startswith('$ ')]
        elif kind:
            continue
        yield from (shlex.split(line, comments=True) for line in lines)


def made_small(words):
    more = [flags for row, flags in SMALL.items() if re.search(row, shlex.join(words))]
    for name, folder in MODELS.items():
        words = [word.replace(name, folder) for word in words]
    return [*words, *shlex.split(' '.join(more))]


@pytest.fixture
def place(tmp_path):
    """Return a clone, with what a reader has besides: texts, chats, a model's folder."""
    shutil.copytree(ROOT, tmp_path, ignore=UNTRACKED, dirs_exist_ok=True)
    for folder in ('.venv', 'texts'):
        (tmp_path / folder).mkdir()
    (tmp_path / '.venv' / 'ready').touch()
    parquet(tmp_path / 'texts' / 'a.parquet', PAGE.split('\n\n'))
    (tmp_path / 'texts' / 'a.txt').write_text(PAGE)
    chat, = re.findall(r'^```json\n(.*?)^```$', PAGE, re.S | re.M)
    (tmp_path / 'chats.jsonl').write_text(''.join(chat.replace('Where', f'{i}: where') for i in range(200)))
    save_llama(tmp_path / 'llama', chat_template=CHATML)
    return tmp_path


def of_make(target, place):
    """The commands of Python in a target of the Makefile."""
    recipe = subprocess.run(['make', '--dry-run', target], cwd=place, capture_output=True, text=True)
    lines = re.findall(r'^(?:echo; )?\.venv/bin/(python .*)', recipe.stdout, re.M)
    assert lines, recipe.stderr
    return [shlex.split(line) for line in lines]


def play(words, place):
    """Runs a command, made small, in the folder `place`. Raises where it does not end with exit code 0."""
    program, *rest = made_small(words)
    if program == 'make':
        for line in of_make(*rest, place):
            play(line, place)
    elif program == 'python':
        run(*rest, cwd=place, fork=rest[0] != 'prepare_data.py')     # its workers are forks themselves
    else:
        raise ValueError(f'{program}: no row of LEFT_OUT says why it is not run')


@pytest.mark.slow
def test_the_commands_run_in_the_order_given(place):
    for words in commands(PAGE):
        if not any(shlex.join(words).startswith(row) for row in LEFT_OUT):
            play(words, place)


def test_ten_lines_print_what_stands_below_them(capsys):
    code, printed = re.search(r'```python\n(.*?)```\s+```text\n(.*?)```', PAGE, re.S).groups()
    exec(code, {})
    number = r'-?\d+\.\d*(?:e-\d+)?'
    theirs = capsys.readouterr().out
    assert re.sub(number, '', theirs).split() == re.sub(number, '', printed).split()
    ours, theirs = ([*map(float, re.findall(number, text))] for text in (printed, theirs))
    assert theirs == pytest.approx(ours, rel=1e-3)


# the scripts whose words are settings of their own alone -> the setting that the first word is
SETTINGS = dict.fromkeys(('train.py', 'train_fp8.py', 'sample.py', 'hellaswag.py', 'diagnose.py'))
SETTINGS |= {'prepare_data.py': 'dataset'}
# those whose words argparse reads -> the function that does
BY_ARGPARSE = {'bench.py': bench.bench_arguments, 'hf.py': hf.arguments,
               'plan.py': plan.plan_arguments, 'plot.py': plot.plot_arguments}


def test_the_scripts_know_the_words_of_a_page(monkeypatch):
    monkeypatch.chdir(ROOT)
    known, wrong = set(), []
    pages = [PAGE, *map(Path.read_text, PAGES)]
    for program, *words in [line for page in pages for line in [*commands(page), *spans(page)]]:
        if program == 'torchrun':
            asked = launcher.get_args_parser().parse_args(words)
            words = [asked.training_script, *asked.training_script_args]
        if program not in ('python', 'torchrun') or '--help' in words:
            continue
        known.add(words[0])
        try:
            if words[0] in SETTINGS:
                configure(words[0], words[1:], SETTINGS[words[0]])
            elif words[0] in BY_ARGPARSE:
                BY_ARGPARSE[words[0]](words[1:])
        except SettingError as error:
            wrong.append(f'{shlex.join(words)}: {error}')
    assert wrong == []
    assert known >= SETTINGS.keys() | BY_ARGPARSE.keys()
