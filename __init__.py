"""The files beside this one as a package: `pip install .`, then `from fp8gpt import fp8, model`.

They name each other bare (`import fp8`), so that each runs as it lies. Loaded as fp8gpt's, a file gets
fp8gpt's others by those names, and nobody else does: your own model.py stays what your `import model` finds.
"""
import ast
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

OURS = {path.stem for path in Path(__file__).parent.glob('*.py')}
OURS |= {path.parent.name for path in Path(__file__).parent.glob('*/*.py')}


class FullNames(ast.NodeTransformer):
    """import fp8 -> import fp8gpt.fp8 as fp8; from fp8 import choose -> from fp8gpt.fp8 import choose."""

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name in OURS:
                alias.asname = alias.asname or alias.name
                alias.name = f'{__name__}.{alias.name}'
        return node

    def visit_ImportFrom(self, node):
        if node.module.partition('.')[0] in OURS:
            node.module = f'{__name__}.{node.module}'
        return node


class Loader(SourceFileLoader):
    """Of a file's code with the full names."""

    def get_code(self, name):
        """Compiled anew each time: bytecode kept beside the file is of its bare names."""
        path = self.get_filename(name)
        tree = FullNames().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, 'exec', dont_inherit=True)


class Finder:
    """Of the package's own modules, for sys.meta_path."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith(f'{__name__}.'):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and spec.origin:  # a folder without a file of its own has none
            spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
