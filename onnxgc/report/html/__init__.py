"""A page that shows where the memory of a training step goes: one HTML file that needs nothing else.

`data` says what is shown, of a step and of each of its schedules; `curves`, `strip`, `trade_off` and
`tables` draw one part each, readable as they are; `payload` is what the script reads to make them
interactive; `page` puts the parts together.
"""
