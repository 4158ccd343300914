"""Pages that show memory over a training step: each is one HTML file that loads nothing.

`curves`, `strip`, `trade_off` and `tables` draw one part each, readable without JavaScript; `payload` is the
data for the script that makes them interactive; `page` and `comparison` assemble the parts.
"""
