"""--help answers: in groups, within a screen's width, with the names that users bring."""
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


def test_it_fits_a_screen_and_has_every_setting_with_its_comment():
    wrong = []
    for script in SCRIPTS:
        out, settings = helped(script), read_script(ROOT / script).settings
        joined = ' '.join(out.split())
        wrong += [(script, line) for line in out.splitlines() if len(line) > 110]
        for name, setting in settings.items():
            if f'\n  --{name} ' not in out or setting.comment not in joined:
                wrong.append((script, name))
    assert wrong == []
    assert run('train.py', '--help').stdout == helped('train.py')


def test_argparse_tells_each_flag_and_what_it_is(monkeypatch):
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


def test_each_command_is_told_and_has_settings_of_its_own():
    out = helped('bench.py')
    assert re.search(r'\n +gemm +each shape of linear in a model, bf16 and FP8 in turn\n', out)
    assert '--rounds' not in out
    assert re.search(r'\n  --rounds ROUNDS .*\(default: 5\)\n', helped('bench.py', 'pair'))
    assert '--seeds' not in helped('bench.py', 'pair')


NAMES = {word.lstrip('-').partition('=')[0] for line in (*RESOLVED, *REFUSED) for word in shlex.split(line)
         if word.startswith('--')} - {'max_step', 'wormup_steps'}    # which are misspelt


def test_every_flag_that_users_arrive_with_is_told():
    out = ' '.join(helped('train_fp8.py').split())
    told = set(re.findall(r'--(\w+)', out))
    for also in re.findall(r'\(also ([^)]+)\)', out):
        told.update(also.split(', '))
    wanted = NAMES - {'config'} | TRANSLATED.keys() | ALIASES.keys()
    assert len(wanted) > 50
    switches = {name for name in wanted if {name[3:], f'use_{name[3:]}'} & told and name.startswith('no_')}
    assert wanted - told - switches == {'start'}
    assert '(also start)' in helped('sample.py')
    assert '--mixed_precision bf16 as --use_fp8=False' in out
    assert '--dropout no setting: no model here has dropout' in out
    groups = [line[2:] for line in (ROOT / 'train_fp8.py').read_text().splitlines()
              if re.fullmatch('# [a-zA-Z8 ]{2,40}', line)][:9]
    found = [out.index(f' {group} --') for group in groups]
    assert len(found) > 6 and found == sorted(found)      # in the order of the source
