"""Eagle3 Lab: see, switch and measure Eagle3 speculative decoding on a real vLLM engine."""

__version__ = "0.1.0"
