"""Architectures of timm and torchvision with random weights and small images: cases for ``benchmarks/bytes.py``.

A name is ``timm:MODEL SIZE OPTION …`` or ``torchvision:MODEL SIZE OPTION …``; SIZE is that of the images. An option is
an argument of the model's constructor, ``depth=2``; ``sized`` stands for ``img_size=SIZE``, ``frames=N`` for videos of
N frames, ``train`` for a detector that gets boxes and computes its losses.
"""

from __future__ import annotations

import ast
import importlib
import operator
from typing import Any

import torch

TIMM = """
botnet26t_256 64 sized; gcresnext26ts 64; gernet_s 64; halonet26t 256
lambda_resnet26t 64; mobileone_s0 64; regnetz_b16 64; repvgg_a0 64
beit_base_patch16_224 64 sized depth=2 embed_dim=96 num_heads=3; cait_xxs24_224 64 sized depth=4
coat_lite_tiny 64 sized; convnext_atto 64; convnextv2_femto 64; cs3darknet_s 64; cspresnet50 64; darknet17 64
davit_tiny 64 depths=(1,1,2,1); deit3_small_patch16_224 64 sized depth=3; deit_tiny_patch16_224 64 sized depth=3
densenetblur121d 64; dla34 64; dla46x_c 64; dpn68b 64; edgenext_xx_small 64; efficientformer_l1 224
efficientformerv2_s0 224; efficientnet_b0_gn 64; efficientnet_blur_b0 64; efficientnet_cc_b0_4e 64
efficientnet_lite0 64; tf_efficientnetv2_b0 64; mixnet_s 64; mnasnet_small 64; mobilenetv2_050 64
mobilenet_edgetpu_100 64; tinynet_e 64; efficientvit_b0 64; eva02_tiny_patch14_224 56 sized depth=3
fasternet_t0 64; fastvit_t8 64; focalnet_tiny_srf 64; gcvit_xxtiny 224; ghostnet_050 64; ghostnetv2_100 64
hardcorenas_a 64; hgnetv2_b0 64; hiera_tiny_224 224 stages=(1,1,1,1); hrnet_w18_small 64; inception_next_atto 64
inception_v3 96; inception_v4 96; levit_128 224; mambaout_femto 64; coatnet_pico_rw_224 64 sized
maxvit_pico_rw_256 64 sized; poolformer_s12 64; gmixer_12_224 64 sized; gmlp_ti16_224 64 sized
resmlp_12_224 64 sized; mixer_s16_224 64 sized; fbnetv3_b 64; lcnet_050 64; mobilenetv3_small_075 64
mobilenetv4_conv_small 64; mobilevit_xxs 64; mvitv2_tiny 64 sized; nest_tiny 64 sized; nextvit_small 64
nf_ecaresnet26 64; nf_regnet_b0 64; nfnet_l0 64; pit_ti_224 64 sized; pvt_v2_b0 64; rdnet_tiny 64
regnetx_002 64; regnetz_005 64; repghostnet_050 64; repvit_m0_9 64; res2net50_14w_8s 64; resnest14d 64
resnet10t 64; resnet26d 64; resnetaa34d 64; resnetblur18 64; resnext50_32x4d 64; seresnext26t_32x4d 64
ecaresnet26t 64; resnet50_gn 64; resnetv2_18 64; resnetv2_50x1_bit 64; resnetv2_50d_evos 64; rexnet_100 64
selecsls42 64; legacy_seresnext26_32x4d 64; sequencer2d_s 64 layers=(1,1,2,1); shvit_s1 64; skresnet18 64
starnet_s050 64; swiftformer_xs 224; swin_tiny_patch4_window7_224 56 sized depths=(1,1,2,1)
swinv2_cr_tiny_ns_224 64 sized depths=(1,1,2,1); tiny_vit_5m_224 64; tnt_s_patch16_224 64 sized depth=3
tresnet_m 64; twins_pcpvt_small 64 sized depths=(1,1,2,1); twins_svt_small 64 sized depths=(1,1,2,1)
vgg11_bn 64; visformer_tiny 64 sized; vit_relpos_small_patch16_224 64 sized depth=3
vit_tiny_r_s16_p8_224 64 sized depth=3; vit_small_patch32_224 64 sized depth=3
samvit_base_patch16_224 64 sized depth=2; volo_d1_224 64 sized; ese_vovnet19b_slim_dw 64; vovnet39a 64
legacy_xception 64; xcit_nano_12_p16_224 64 sized depth=3; convit_tiny 64 sized depth=3
crossvit_9_240 240 depth=((1,2,0),(1,2,0),(1,2,0)); csatv2 64; cpubone_nano 64; cspnext_tiny 64
efficientvim_m1 64; iformer_t 64; lcnetv2_small 64; lowformer_b0 64
"""

TORCHVISION = """
alexnet 64; convnext_tiny 64; densenet169 64; efficientnet_b0 64; efficientnet_v2_s 64
googlenet 64 init_weights=False; inception_v3 96 aux_logits=False init_weights=False; maxvit_t 224
mnasnet0_75 64; mobilenet_v2 64; mobilenet_v3_small 64; regnet_x_400mf 64; regnet_y_400mf 64; resnext50_32x4d 64
wide_resnet50_2 64; shufflenet_v2_x0_5 64; squeezenet1_0 64; swin_t 64; swin_v2_t 64; vgg13 64
vit_b_32 64 image_size=64; segmentation.deeplabv3_mobilenet_v3_large 64
segmentation.lraspp_mobilenet_v3_large 64; segmentation.fcn_resnet50 64 aux_loss=True; video.mc3_18 32 frames=8
video.r2plus1d_18 32 frames=8; video.s3d 224 frames=16; video.swin3d_t 32 frames=8
detection.fcos_resnet50_fpn 64 train; detection.retinanet_resnet50_fpn_v2 64 train
optical_flow.raft_small 128 pair
"""


def names() -> list[str]:
    """The cases."""
    listed = {"timm": TIMM, "torchvision": TORCHVISION}
    return [
        f"{library}:{case.strip()}"
        for library, text in listed.items()
        for case in text.replace("\n", ";").split(";")
        if case.strip()
    ]


def build(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """(model in training mode, arguments, keyword arguments), the same at every call."""
    let_torchvision_be_imported()
    library, case = name.split(":", 1)
    kind, side, *words = case.split()
    size = int(side)
    own = {key: ast.literal_eval(value) for key, eq, value in (word.partition("=") for word in words) if eq}
    frames = own.pop("frames", None)
    torch.manual_seed(0)
    if library == "timm":
        own |= {"img_size": size} if "sized" in words else {}
        model = importlib.import_module("timm").create_model(kind, num_classes=10, **own)
    else:
        own |= {"min_size": size, "max_size": size} if "train" in words else {}
        make = operator.attrgetter(kind)(importlib.import_module("torchvision.models"))
        own |= {"weights_backbone": None} if kind.startswith(("segmentation", "detection")) else {}
        model = make(weights=None, **own)
    return model.train(), arguments(words, size, frames), {}


def arguments(words: list[str], size: int, frames: int | None) -> tuple[Any, ...]:
    """Two images, or one video, two pairs of images, or two images with a box in each."""
    if frames:
        return (torch.randn(1, 3, frames, size, size),)
    if "train" in words:
        boxes = [{"boxes": torch.tensor([[5.0, 5.0, 30.0, 40.0]]), "labels": torch.tensor([1])} for _ in range(2)]
        return [torch.rand(3, size, size) for _ in range(2)], boxes
    images = torch.randn(2, 3, size, size)
    return (images, torch.randn(2, 3, size, size)) if "pair" in words else (images,)


_schemas: list[torch.library.Library] = []


def let_torchvision_be_imported() -> None:
    """Where its compiled operators do not load, the schemas that it looks up are defined."""
    try:
        importlib.import_module("torchvision")
    except (OSError, RuntimeError):
        _schemas.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _schemas[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
