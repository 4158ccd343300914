// The safetensors format: a length, a header in JSON, and the contents of tensors.
const TYPES = { F32: ["float32", Float32Array], I64: ["int64", BigInt64Array] };

/** The tensors and the metadata of a safetensors file. */
export function parse(ort, bytes) {
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata, ...header } = JSON.parse(new TextDecoder().decode(buffer.slice(8, start)));
  const tensor = ({ dtype, shape, data_offsets: [first, last] }) =>
    new ort.Tensor(TYPES[dtype][0], new TYPES[dtype][1](buffer.slice(start + first, start + last)), shape);
  return [Object.fromEntries(Object.entries(header).map(([name, about]) => [name, tensor(about)])), metadata];
}

/** A safetensors file as a list of parts. */
export function parts(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const dtype = Object.keys(TYPES).find((key) => TYPES[key][0] === type);
    header[name] = { dtype, shape: dims, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  return [new BigUint64Array([BigInt(text.length)]), text, ...Object.values(tensors).map((tensor) => tensor.data)];
}
