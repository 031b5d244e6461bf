"""The client's side of the block store: blocks of K/V by key, for engines that have a pool of their own."""
