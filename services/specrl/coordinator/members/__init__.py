"""The members of a run: its replicas and its trainer, their states, and the policy version that each replica serves.

`registry` holds the members and `replica_states` the state machine of a replica. `weight_update` sends weights to
replicas. `trainer_link` calls the trainer and recovers it. `replica_session` runs rollouts at one replica.
"""
