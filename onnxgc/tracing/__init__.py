"""From a differentiated model to what planning works on: step graph, computation graph, costs."""
