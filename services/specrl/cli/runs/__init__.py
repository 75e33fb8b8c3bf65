"""Commands on the runs of this machine: start, watch and control them; report, keep or delete what they wrote.

Called by `specrl.cli`. Each command takes a run by its folder or name.
"""
