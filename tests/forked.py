"""Run the repository's scripts in forks of a process that has imported torch and the repository's modules.

A fork does what `python SCRIPT ...` does, without the four seconds that importing torch and its compiler
takes. The process that is forked runs nothing itself, so that no thread, seed or patch of a test reaches a
script.
"""
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
forks = multiprocessing.get_context('forkserver')
forks.set_forkserver_preload(['torch._dynamo', 'torch.distributed', 'forked', 'preloaded'])


def forget_our_modules():
    """Forget the imported modules of ROOT: a script of another clone imports what it finds there."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, '__file__', None) or ''
        ours = path.startswith(f'{ROOT}{os.sep}') and os.sep + '.venv' + os.sep not in path
        if ours and os.path.dirname(path) != str(ROOT / 'tests'):
            del sys.modules[name]


def set_bf16_units():
    """Let model.py take this CPU for one with or without bf16 units, as TEST_BF16_UNITS says."""
    if 'TEST_BF16_UNITS' in os.environ:
        import model
        model.NO_BF16_UNITS = os.environ['TEST_BF16_UNITS'] == 'off'


def play(words, cwd, env, streams):
    """In a fork: runs words[0] as __main__, streams being the paths of its stdout and stderr."""
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    script = os.path.join(cwd, words[0])
    folder = os.path.dirname(script)
    if folder != str(ROOT) and os.path.exists(f'{folder}/model.py'):
        forget_our_modules()
    set_bf16_units()
    sys.argv = words
    sys.path.insert(0, folder)
    try:
        runpy.run_path(script, run_name='__main__')
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # a script's own, which may exit
        sys.exit(1)


def start(words, cwd, env):
    """(a process that runs the script, the paths of its stdout and stderr)."""
    folder = tempfile.mkdtemp()
    streams = [os.path.join(folder, name) for name in ('stdout', 'stderr')]
    for path in streams:  # now: the process may be killed at once
        open(path, 'w').close()
    process = forks.Process(target=play, args=(words, str(cwd), env, streams))
    process.start()
    return process, streams


def finish(words, process, streams, timeout):
    """The subprocess.CompletedProcess of what start returned. Raises subprocess.TimeoutExpired."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(words, timeout)
    texts = []
    for path in streams:
        with open(path) as file:
            texts.append(file.read())
        os.remove(path)
    os.rmdir(os.path.dirname(path))
    return subprocess.CompletedProcess(words, process.exitcode, *texts)
