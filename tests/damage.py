"""What a disk may do to a file, and what a reader makes of it."""
import os
import random

from configurator import UserError


def damages(raw, cases, seed=0):
    """Yields (what was done, bytes): `cases` cuts, flipped bits and zeroed stretches of a file's bytes."""
    draw = random.Random(seed)
    for _ in range(cases):
        at = draw.randrange(len(raw))
        kind = draw.choice(('cut', 'flip', 'flip at the end', 'zeros'))
        spoilt = bytearray(raw)
        if kind == 'cut':
            del spoilt[at:]
        elif kind == 'zeros':
            length = draw.choice((1, 16, 512, 4096))
            spoilt[at:at + length] = bytes(len(spoilt[at:at + length]))
        else:
            at = at if kind == 'flip' else len(raw) - 1 - at % min(len(raw), 8192)
            spoilt[at] ^= 1 << draw.randrange(8)
        if spoilt != raw:
            yield f'{kind} at {at}', bytes(spoilt)


def survived(path, read, same, cases, seed=0):
    """Damages of a file that `read(path)` takes wrongly: [what was done and what came of it]. It is to say
    them in one line, by a UserError, or to return what is same(it) as from the whole file.

    path: of a file that may be overwritten; it is left whole."""
    with open(path, 'rb') as file:
        raw = file.read()
    wrong = []
    for what, spoilt in [*damages(raw, cases, seed), ('whole again', raw)]:
        with open(f'{path}.new', 'wb') as file:
            file.write(spoilt)
        os.replace(f'{path}.new', path)  # what was mapped before stays as it is
        try:
            if not same(read(path)):
                wrong.append(f'{what}: taken as something else')
        except UserError as error:
            if '\n' in str(error) or what == 'whole again':
                wrong.append(f'{what}: {error}')
        except Exception as error:
            wrong.append(f'{what}: {type(error).__name__}: {error}')
    return wrong
