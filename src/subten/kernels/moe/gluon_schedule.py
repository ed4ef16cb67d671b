"""How the work of a launch is shared out: a range of slices for each program, and the runs that it does at a time.

The list of all work has a place for every slice of an expert and every tile of columns of its tokens. It is cut into
ranges, one for each program. A program goes through its range in runs: slices of one expert, one
behind the other, for one tile of columns. All slices of a run go through gate and up, and then through down
together, so that their outputs are added up in the program before they are added to the sums in memory.

Where an expert has several tiles, the list takes its slices in blocks as long as a range, and a block for each tile
in turn. Programs next to each other then read the same weights at the same time, all but the first from the L2.

Numbers in, numbers out: the tests call these functions as they stand, without a GPU.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon


@gluon.jit
def range_of(number, places, programs, TILED):
    """The range of a program, from where to where; how long ranges are at most; and how many programs have one.

    Args:
        number: of the program.
        places: of the whole list.
        programs: that there are.
        TILED: whether an expert can have several tiles. Ranges are of the same length then, but for the last, so
            that programs next to each other stay at the same slices. Otherwise they differ by one at most, and all
            have some: what is left at the end, when some have done their part, is read faster by the others.
    """
    length = (places + programs - 1) // programs
    if TILED:
        begin = min(number * length, places)
        end = min(begin + length, places)
        busy = (places + length - 1) // length
    else:
        busy = min(places, programs)
        begin = min(number, busy) * places // busy
        end = min(number + 1, busy) * places // busy
    return begin, end, length, busy


@gluon.jit
def run_at(place, end, block, tiles, slices, LONGEST):
    """The run that begins at a place of an expert's part of the list: its first slice, its tile of columns, and how
    many slices it has.

    Args:
        place: in the part of the expert, from 0 on.
        end: of the range, likewise; beyond the part where the range goes on with another expert.
        block: length of the ranges, where there are several tiles.
        tiles: of columns of the expert's tokens.
        slices: of the expert.
        LONGEST: run that there is room for. What is longer is cut evenly.
    """
    # Divisions take long, and hardly any run needs one: most experts have one tile, most runs fit.
    begin, tile, first, width = 0, 0, place, slices
    if tiles > 1:
        number = place // (block * tiles)
        begin = number * block
        width = min(block, slices - begin)
        tile = (place - begin * tiles) // width
        first = place - begin * tiles - tile * width
    length = min(width - first, end - place)
    if length > LONGEST:
        runs = (length + LONGEST - 1) // LONGEST
        length = (length + runs - 1) // runs
    return begin + first, tile, length
