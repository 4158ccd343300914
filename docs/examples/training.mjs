// Training of the digits in JavaScript; `ort` is onnxruntime-node or onnxruntime-web, `read(name)` the bytes of a file.
import { parse, parts } from "./safetensors.mjs";

/** Trains; returns the losses, the accuracy, and the state as a safetensors file. */
export async function train(ort, read, { epochs = 3, rate = 0.003, ...options } = {}) {
  let [state, metadata] = parse(ort, await read("digits-training.safetensors"));
  const contract = JSON.parse(metadata["onnxgc.contract"]);
  const [data] = parse(ort, await read("digits-data.safetensors"));
  const settings = { enableMemPattern: false, logSeverityLevel: 3, ...options };
  const session = await ort.InferenceSession.create(await read("digits-training.onnx"), settings);
  const evaluation = await ort.InferenceSession.create(await read("digits-evaluation.onnx"), settings);
  const size = contract.inputs.x.shape[0];
  const batchOf = (first, ending) => Object.fromEntries(contract.batch.map((name) => {
    const { type, dims, data: all } = data[name + ending], one = all.length / dims[0];
    return [name, new ort.Tensor(type, all.slice(first * one, (first + size) * one), [size, ...dims.slice(1)])];
  }));
  const losses = [];
  for (let epoch = 0; epoch < epochs; epoch++) {
    for (let first = 0; first < data.x.dims[0]; first += size) {
      const feeds = { ...state, ...batchOf(first, "") }, updates = losses.length;
      if (contract.learning_rate) feeds[contract.learning_rate] = new ort.Tensor("float32", [rate], []);
      if (contract.step) feeds[contract.step] = new ort.Tensor("int64", [BigInt(updates + 1)], []);
      if (contract.draw) feeds[contract.draw] = new ort.Tensor("int64", [BigInt(updates)], []);
      const results = await session.run(feeds, [contract.loss, ...Object.values(contract.pairs)]);
      state = Object.fromEntries(Object.entries(contract.pairs).map(([old, next]) => [old, results[next]]));
      losses.push(results[contract.loss].data[0]);
    }
  }
  const weights = Object.fromEntries(Object.entries(state).filter(([name]) => contract.evaluation.inputs.includes(name)));
  let right = 0;
  for (let first = 0; first < data.x_test.dims[0]; first += size) {
    const batch = batchOf(first, "_test");
    const { data: scores } = (await evaluation.run({ ...weights, ...batch }))[contract.evaluation.outputs[0]];
    for (let i = 0; i < size; i++) {
      const row = scores.slice(i * 10, i * 10 + 10);
      right += row.indexOf(Math.max(...row)) === Number(batch.labels.data[i]);
    }
  }
  const file = parts(state, { ...metadata, "onnxgc.updates": String(losses.length) });
  return { losses, accuracy: right / data.x_test.dims[0], file };
}
