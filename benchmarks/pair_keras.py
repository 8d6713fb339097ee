"""W2 and W3 in Keras, under TensorFlow's MirroredStrategy on logical CPUs."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks.pair import LR, Windows, Workload


def train(workload: Workload, steps: int, *, replicas: int) -> float:
    """Return seconds per step of `replicas` logical CPUs with one thread each."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(replicas)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    inputs, targets = (part.numpy() for part in workload.make_data())
    if inputs.ndim == 4:
        inputs = inputs.transpose(0, 2, 3, 1)
    samples = tf.data.Dataset.from_tensor_slices((inputs, targets)).cache().shuffle(len(targets))
    batches = samples.batch(workload.batch, drop_remainder=True).repeat().prefetch(2)
    with strategy.scope():
        model = _convnet() if inputs.ndim == 4 else _gpt()
        model.compile(
            optimizer=keras.optimizers.AdamW(LR),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,  # and one step an execution: more fail here, "must feed a value for placeholder tensor"
        )
    clock = Windows(workload, steps)
    ticking = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.tick())
    model.fit(batches, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[ticking])
    return clock.seconds_a_step


def _convnet() -> Any:
    blocks: list[Any] = [keras.Input((28, 28, 1))]
    for width in (32, 64, 128):
        blocks += [layers.Conv2D(width, 3, padding="same", use_bias=False), layers.MaxPool2D()]
        blocks += [layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*blocks, layers.Flatten(), layers.Dense(10)])


def _gpt() -> Any:
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(256, 128)(tokens) + layers.Embedding(128, 128)(tf.range(128))
    for _ in range(4):
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(4, 32, use_bias=False)(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        wide = layers.Dense(512, activation="gelu", use_bias=False)(normed)
        x = x + layers.Dense(128, use_bias=False)(wide)
    return keras.Model(tokens, layers.Dense(256, use_bias=False)(layers.LayerNormalization(epsilon=1e-5)(x)))
