"""The story, one step after another: what is generated, with which version, when it trains, when weights move."""
