"""A run on several hosts: who starts what where, what is lost, how folders travel."""
