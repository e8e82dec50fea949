"""One transformer, trained by fpipe and by its peers: a file for each library."""
