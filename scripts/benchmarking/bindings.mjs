// Memory of training steps in JavaScript: node bindings.mjs PACKAGE_FOLDER FILE OPTIONS STEPS, for bindings.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, file, settings, steps] = process.argv.slice(2);
const memories = [];
const Memory = WebAssembly.Memory;
WebAssembly.Memory = function (...how) { return memories[memories.push(new Memory(...how)) - 1]; };
const ort = await import(pathToFileURL(createRequire(`${folder}/`).resolve(basename(folder))));
const { parse } = await import(new URL("../../docs/examples/safetensors.mjs", import.meta.url));
if (basename(folder) === "onnxruntime-web") ort.env.wasm.numThreads = 1;

const status = (key) => 1024 * Number(new RegExp(`${key}:\\s+(\\d+)`).exec(readFileSync("/proc/self/status", "utf8"))[1]);
let [state, metadata] = parse(ort, readFileSync(file.replace(/onnx$/, "safetensors")));
const contract = JSON.parse(metadata["onnxgc.contract"]), batch = {};
for (const name of [...contract.batch, "learning_rate", "step", "draw"]) {
  const about = contract.inputs[contract[name] ?? name];
  if (!about) continue;
  const size = about.shape.reduce((a, b) => a * b, 1), isFloat = about.type === "float32";
  const values = isFloat ? new Float32Array(size).map((_, i) => Math.sin(i) / 2) : new BigInt64Array(size).fill(1n);
  if (name === "learning_rate") values.fill(1e-3);
  batch[contract[name] ?? name] = new ort.Tensor(about.type, values, about.shape);
}
const model = readFileSync(file);
globalThis.gc();
const before = status("VmRSS");
const session = await ort.InferenceSession.create(model, { intraOpNumThreads: 1, logSeverityLevel: 3, ...JSON.parse(settings) });
writeFileSync("/proc/self/clear_refs", "5"); // The peak of the steps, without that of loading.
for (let step = 0; step < Number(steps); step++) {
  const results = await session.run({ ...state, ...batch }, [contract.loss, ...Object.values(contract.pairs)]);
  state = Object.fromEntries(Object.entries(contract.pairs).map(([old, next]) => [old, results[next]]));
  if (!Number.isFinite(results[contract.loss].data[0])) throw new Error("the loss is not finite");
}
const heap = memories.map((memory) => memory.buffer.byteLength);
console.log(heap.length ? Math.max(...heap) : status("VmHWM") - before);
