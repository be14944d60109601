"""Everything on the real machine, into one archive: `eagle3-lab fieldtest RECIPE`."""
