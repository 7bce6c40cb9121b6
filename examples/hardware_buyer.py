"""What machines do, from their benchmark records: python examples/hardware_buyer.py mine.json theirs.json"""

import statistics
import sys
from pathlib import Path

from rlcore.bench.record import read

for path in map(Path, sys.argv[1:]):
    record = read(path)  # refuses what is not a whole rlcore.bench/1 record
    system = record.system
    print(f"{path.name}: {system.accelerator_model_name or system.host_processor_model_name}, ", end="")
    print(f"torch {record.dependencies['torch']}, {record.num_threads} host threads, commit {record.commit}")
    for case in record.cases:
        if case.status != "pass":
            print(f"  {case.name:22}  {case.implementation:9}  {case.status}: {case.reason}")
            continue
        seconds = statistics.median(case.samples("time"))
        spread = (max(case.samples("time")) - min(case.samples("time"))) / seconds
        rate = f"{case.flops / seconds / 1e9:10,.1f} GFLOP/s" if case.flops else ""
        traffic = f"{case.bytes / seconds / 1e9:8,.1f} GB/s" if case.bytes else ""
        print(f"  {case.name:22}  {case.implementation:9}  {seconds:.3e} s  spread {spread:4.0%}  {rate}  {traffic}")
