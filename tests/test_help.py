"""--help answers: in groups, within a screen's width, with the names that users bring."""
import contextlib
import io
import re
import runpy
import shlex
import sys

import pytest

from configurator import ALIASES, FIXED, OTHERWISE, TRANSLATED, read_script
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


def test_settings_stand_in_the_groups_of_the_source():
    out, source = helped('train_fp8.py'), (ROOT / 'train_fp8.py').read_text()
    places = ['\nwhat to train\n', '--init_from ', '\ndata\n', '--dataset ', '--num_workers ',
              '\nbatch and length of the run\n', '--batch_size ', '\noptimizer\n', '--max_lr ', '\nLoRA\n']
    found = [out.index(place) for place in places]
    assert found == sorted(found)
    groups = [part.splitlines()[0] for part in out.split('\n\n') if '\n  --' in part]
    assert groups.pop() == 'names from other systems'
    assert all(f'\n# {group}\n' in source for group in groups)


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
    wanted = NAMES - {'config'} | TRANSLATED.keys() | FIXED.keys() | OTHERWISE.keys() | ALIASES.keys()
    assert len(wanted) > 50
    switches = {name for name in wanted if {name[3:], f'use_{name[3:]}'} & told and name.startswith('no_')}
    assert wanted - told - switches == {'start'}
    assert '(also start)' in helped('sample.py')


def test_what_other_systems_say_comes_to():
    out = ' '.join(helped('train_fp8.py').split())
    assert '--max_lr 0.0006 > 0: peak learning rate; GPT-3\'s for 125M (also learning_rate)' in out
    assert '--mixed_precision bf16 as --use_fp8=False' in out
    assert '--use_te as --fp8_backend=auto:te' in out
    assert '--dropout 0.0 changes nothing: no model here has dropout' in out
    assert '--min_lr no setting: --min_lr_ratio is its share of max_lr' in out
    assert 'other systems' not in helped('sample.py')
