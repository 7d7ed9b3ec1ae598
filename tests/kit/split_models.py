"""Models in several files, as gguf-split writes them: the metadata in the first, split.* in all."""

import gguf
import numpy as np

from eagle3_llama.common.gguf_reader import read_gguf

T = gguf.GGUFValueType


def split(path, folder, count, name="model", apart=()):
    """Writes a GGUF in `count` parts to the folder; returns their paths. apart: tensors for the last one."""
    file, folder = read_gguf(path), folder / "parts"
    folder.mkdir(exist_ok=True)
    rest = [n for n in file.tensors if n not in apart]
    groups = [list(g) for g in np.array_split(rest, count)]
    groups[-1] += apart
    paths = [folder / f"{name}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, (part, names) in enumerate(zip(paths, groups)):
        w = gguf.GGUFWriter(part, file.string("general.architecture"))
        if i:
            w.kv_data[0].clear()  # the writer's own key
        for key, v in file.keys.items() if not i else ():
            if key != "general.architecture":
                w.add_key_value(key, v.value, v.type, v.item_type)
        w.add_key_value("split.no", i, T.UINT16)
        w.add_key_value("split.count", count, T.UINT16)
        w.add_key_value("split.tensors.count", len(file.tensors), T.INT32)
        for n in names:
            t = file.tensors[n]
            data = np.memmap(path, np.uint8, "r", t.offset, (t.n_bytes,))
            shape = gguf.quant_shape_to_byte_shape(t.shape, t.qtype)
            w.add_tensor(n, data.reshape(shape), raw_dtype=t.qtype)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    return paths
