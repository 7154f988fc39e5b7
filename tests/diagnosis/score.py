"""Score the product on the corpus: `python tests/diagnosis/score.py [--mode MODE] [--write-open] [NAME...]`.

Prints what each report has wrong. `--write-open` writes corpus/open.txt anew: what is not right yet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from failure_cases import CORPUS, MODES, read_corpus
from replayed import replay


def main() -> None:
    """Replay, print the table, and write the list if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="only these cases or themes")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--write-open", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the reports, too")
    chosen = parser.parse_args()
    right: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    still_open = []
    for case in read_corpus():
        if chosen.names and not {case.name, case.theme} & set(chosen.names):
            continue
        for mode in case.modes:
            if mode not in (chosen.mode or MODES):
                continue
            with tempfile.TemporaryDirectory() as folder:
                faults, text = replay(case, mode, Path(folder))
            tried[mode] += 1
            right[mode] += not faults
            kinds.update(fault.partition(":")[0] for fault in faults)
            if faults:
                still_open.append(f"{mode} {case.name}")
                print(f"{mode:6} {case.theme}/{case.name}: {'; '.join(faults)}", flush=True)
            if chosen.show:
                print(text)
    for mode in MODES:
        if tried[mode]:
            print(f"{mode}: {right[mode]} of {tried[mode]} right")
    print("wrong by kind: " + (", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none"))
    if chosen.write_open:
        of_others = [
            line for line in (CORPUS / "open.txt").read_text().splitlines() if line.split()[0] not in MODES
        ]
        (CORPUS / "open.txt").write_text("".join(f"{line}\n" for line in of_others + still_open))


if __name__ == "__main__":
    main()
