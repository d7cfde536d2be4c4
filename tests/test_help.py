"""--help prints every setting with its comment, within a screen's width, and the names that users bring."""
import contextlib
import io
import runpy
import sys

import pytest

from configurator import ALIASES, TRANSLATED, read_script
from conftest import ROOT, run, typed

SCRIPTS = 'train.py', 'train_fp8.py', 'prepare_data.py', 'sample.py', 'hellaswag.py', 'diagnose.py'


def helped(*words):
    """Return what `words... --help` prints, within this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, typed(*words, '--help'):
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


def test_names_from_other_systems_are_listed():
    out, settings = ' '.join(helped('train_fp8.py').split()), read_script('train_fp8.py').settings
    sets = ALIASES | {theirs: ours for theirs, (ours, _) in TRANSLATED.items()}
    wrong = [name for name, ours in sets.items() if (f'--{name} sets --{ours}' in out) != (ours in settings)]
    assert wrong == []
    assert '--start sets --prompt' in helped('sample.py')
