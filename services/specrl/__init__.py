"""specrl: RL post-training whose rollouts are speculated, lossless, and hidden behind training."""
