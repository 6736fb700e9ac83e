"""A worker of two nodes that adds up, and whose first attempt fails on node 1.

Node 0 notices late: until then node 1 must wait for it.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

attempt, rank = os.environ["MEGAVIS_RESTART_COUNT"], int(os.environ["RANK"])
if attempt == "0":
    time.sleep(4 * (rank == 0))
    sys.exit(3)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
# Threads of a group that is left open may abort the process as it exits.
dist.destroy_process_group()
sys.exit(0 if float(total) == 2 else 4)
