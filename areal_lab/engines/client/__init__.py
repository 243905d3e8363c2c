"""Talk to a running inference server over HTTP."""
