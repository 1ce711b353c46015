"""Overlap: what is chosen by predicted time.

`travelling` says which queries go to their keys, before tokens are dispatched; `choose_stages` in how many
stages keys come, and `late` which queries wait for all their keys instead.
"""
