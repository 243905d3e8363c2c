"""Published speeds of trainers, their predictions, and the fits of the named trainers.

May import all of `costs`; nothing there imports it.
"""
