"""Draw the routing statistics that ``eval_heldout`` wrote.

    python -m tools.demo_moe.plot_routing --results FILE --folder NAME --out FILE

Left: distinct experts a decode step touches against its batch size. Right: the load of each expert in each layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    """Parse the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--folder", required=True, help="name of the evaluated folder in the results")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    routing = json.loads(arguments.results.read_text())[arguments.folder]["routing"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    steps, loads = figure.subplots(1, 2)
    for name, label, style in (
        ("distinct_experts_per_layer", "this model", "o-"),
        ("distinct_if_uniform", "uniform router", "--"),
    ):
        steps.plot([int(b) for b in routing[name]], list(routing[name].values()), style, label=label)
    steps.set_xscale("log", base=2)
    steps.set(xlabel="sequences in the step", ylabel="distinct experts per layer", ylim=(0, None))
    steps.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    steps.legend()
    image = loads.imshow(routing["load"], cmap="viridis", vmin=0, aspect="auto")
    loads.set(xlabel="expert", ylabel="layer", title="share of the routed slots")
    figure.colorbar(image, ax=loads)
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
