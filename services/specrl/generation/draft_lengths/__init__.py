"""Chooses how many tokens are drafted at each step of an engine. Pure, and without vLLM.

decoding_step   one step of the engine, and which steps have a duration that can be compared
step_costs      what a step costs, by batch size and length
acceptance      how many tokens a request emits per step, by length
gains           what drafts cost beside decoding steps, and how much faster they have made the engine
controller      decides: the length of each batch size, tries, catch-ups and trials
"""
