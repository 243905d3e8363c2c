"""Published speeds of trainers, their predictions, and the fits of the named trainers' coefficients.

May import all of `costs`; nothing there imports it.
"""
