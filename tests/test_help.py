"""--help prints every setting with its comment, within a screen's width, and the names that users bring."""
import contextlib
import io
import re
import runpy
import shlex
import sys

import pytest

from configurator import ALIASES, TRANSLATED, read_script
from conftest import ROOT, run
from test_commands import REFUSED, RESOLVED

SCRIPTS = 'train.py', 'train_fp8.py', 'prepare_data.py', 'sample.py', 'hellaswag.py', 'diagnose.py'
BY_ARGPARSE = 'sweep.py', 'plan.py', 'plot.py', 'bench.py', 'hf.py'


def helped(*words):
    """Return what `words... --help` prints, within this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [str(ROOT / words[0]), *words[1:], '--help'])
        patch.setattr(sys, 'excepthook', sys.excepthook)    # to be put back
        with pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name='__main__')
    assert not end.value.code
    return out.getvalue()


def test_it_fits_a_screen_and_has_each_setting_as_in_the_source():
    for script in SCRIPTS:
        lines, source = helped(script).splitlines(), (ROOT / script).read_text().splitlines()
        assert [line for line in lines if len(line) > 110] == []
        settings = [line.split(' = ')[0] for line in lines if ' = ' in line and line in source]
        assert settings == list(read_script(ROOT / script).settings), script
    assert '# what to train' in helped('train.py').splitlines()
    assert run('train.py', '--help').stdout == helped('train.py')


def test_argparse_explains_each_command_and_flag(monkeypatch):
    monkeypatch.setenv('COLUMNS', '110')
    wrong = []
    for script in BY_ARGPARSE:
        pages = [helped(script)]
        commands = re.search(r'\{(.*?)\} \.\.\.', pages[0])
        pages += [helped(script, command) for command in commands[1].split(',')] if commands else []
        for page in pages:
            usage, _, listed = page.partition('\noptions:\n')
            wrong += [(script, line) for line in page.splitlines() if len(line) > 110]
            for flag in re.findall(r'--\w+', usage.split('\n\n')[0]):
                if not re.search(rf'^  (-h, )?{flag}\b.*\s+\w+', listed, re.M):
                    wrong.append((script, flag))
    assert wrong == []
    assert '--backends' not in helped('bench.py')
    assert re.search(r'\n  --steps STEPS .*\(default: 10\)\n', helped('bench.py', 'pair'))


def test_every_flag_that_users_arrive_with_is_listed():
    out = helped('train_fp8.py')
    listed = {*re.findall(r'^(\w+) = ', out, re.M), *re.findall(r'--(\w+)', out)}
    words = [word for line in (*RESOLVED, *REFUSED) for word in shlex.split(line) if word.startswith('--')]
    typed = {word.lstrip('-').partition('=')[0] for word in words} - {'max_step', 'wormup_steps', 'config'}
    missing = (typed | TRANSLATED.keys() | ALIASES.keys()) - listed - {'start', 'use_flash_attn'}
    listed |= TRANSLATED.keys()
    assert [name for name in missing if not {name[3:], f'use_{name[3:]}'} & listed] == []
    assert '--start sets --prompt' in helped('sample.py')
    assert '--mixed_precision sets --use_fp8' in out
