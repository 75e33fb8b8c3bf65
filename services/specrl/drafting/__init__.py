"""The drafter: its EAGLE-3 head, how it is initialised, and how it is kept in step with the policy. No megatron."""
