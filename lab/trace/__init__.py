"""Traces of speculative decoding: the wire format, counts, files and pictures. Knows neither vLLM nor the page."""
