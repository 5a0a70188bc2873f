#!/usr/bin/env bash
# Studies of the papers' claims that are small enough for two cores, one line each. A line starts its study or continues
# it (resume=latest); finished runs are not repeated.
#   DATA=~/data OUT=studies bash jobs/studies.sh rotated_mnist   runs the studies whose names start with rotated_mnist
#   bash jobs/studies.sh                                         lists the studies
#   RUNTIME=inprocess                                            uses one core and one process for a study
# Afterwards: uv run python -m jobs.papers.results $OUT/NAME/runs/*    stores the runs for the papers' tables
#             uv run python -m jobs.papers.pages docs/papers           writes the pages again
# The hours are CPU time of one core (AVX-512), estimated from two to five rounds of each setting: 14.4 s per round for
# FedAvg on RotatedMNIST, 1.0 s on Fashion-MNIST, 1.9 s for FedLD on X-rays, 17 s for FRAug. Those of other methods are
# scaled by the step times that `raysim bench steps` measures, those of the paper's network on Fashion-MNIST by the
# step times of its workload W1.
set -euo pipefail
: "${DATA:=data}" "${OUT:=studies}" "${RUNTIME:=local}"

study() { # name, hours of one core, arguments of raysim study
    local name=$1 hours=$2
    shift 2
    if [ -z "$asked" ]; then
        printf '%-32s about %s hours of one core\n' "$name" "$hours"
    elif [[ $name == "$asked"* ]]; then
        [[ " $* " == *" data=synthetic "* ]] || set -- data.root="$DATA" "$@"
        raysim study out="$OUT/$name" resume=latest runtime="$RUNTIME" runtime.threads=1 "$@"
    fi
}
page() { # name, hours of one core, program that makes a page of docs/studies
    local name=$1 hours=$2 program=$3
    if [ -z "$asked" ]; then
        printf '%-32s about %s hours of one core\n' "$name" "$hours"
    elif [[ $name == "$asked"* ]]; then
        python -m "$program" run "$OUT/$name" data.root="$DATA"
        python -m "$program" collect "$OUT/$name"
        python -m "$program" page
    fi
}
asked=${1:-}

# 1. RotatedMNIST at 14 x 14 pixels. Each test image has one angle (spread), which is ten times cheaper than all angles.
ROTATED=(experiment=fedbr/rotated_mnist data.pool=2 data.rotation.test=spread local.steps=20 local.lr=0.01 rounds=40)
study rotated_mnist 5.0 "${ROTATED[@]}" method=fedavg,fedprox,moon,fedntd,fedbr seed=0..4
study rotated_mnist-no_max_step 1.4 "${ROTATED[@]}" method=fedbr method.fedbr.max_step=false seed=0..4
study rotated_mnist-component_1 1.4 "${ROTATED[@]}" method=fedbr method.fedbr.mu=0 seed=0..4
study rotated_mnist-component_2 1.4 "${ROTATED[@]}" method=fedbr method.fedbr.lam=0 seed=0..4
study rotated_mnist-no_projection 1.4 "${ROTATED[@]}" method=fedbr method.fedbr.projection=none seed=0..4
# Each seed also draws its own split. The mean label entropy of a client is 0.34 (0.15 to 0.65) nats over seeds 0 to 39.
study rotated_mnist-entropy_low 1.3 "${ROTATED[@]}" method=fedavg,fedbr seed=13,39,7 # 0.15 0.17 0.18
study rotated_mnist-entropy_middle 1.3 "${ROTATED[@]}" method=fedavg,fedbr seed=17,29,23 # 0.35 0.35 0.35
study rotated_mnist-entropy_high 1.3 "${ROTATED[@]}" method=fedavg,fedbr seed=0,28,15 # 0.65 0.52 0.50

# The same with a network that costs a tenth, so that all of these studies are affordable.
SMALL=("${ROTATED[@]}" model=small_cnn)
study small-rotated_mnist 0.5 "${SMALL[@]}" method=fedavg,fedprox,moon,fedntd,fedbr seed=0..4
study small-rotated_mnist-no_max_step 0.2 "${SMALL[@]}" method=fedbr method.fedbr.max_step=false seed=0..4
study small-rotated_mnist-component_1 0.1 "${SMALL[@]}" method=fedbr method.fedbr.mu=0 seed=0..4
study small-rotated_mnist-component_2 0.1 "${SMALL[@]}" method=fedbr method.fedbr.lam=0 seed=0..4
study small-rotated_mnist-no_projection 0.2 "${SMALL[@]}" method=fedbr method.fedbr.projection=none seed=0..4

# Rate times steps is 50, as in the paper (1,000 rounds of 50 steps at 0.001).
EQUAL=(experiment=fedbr/rotated_mnist model=small_cnn data.pool=2 data.rotation.test=spread local.lr=0.01 rounds=100)
study fedbr-equal_steps 2.2 "${EQUAL[@]}" method=fedavg,fedprox,moon,fedbr,mixup,fedbr+mixup seed=0..4
study fedbr-equal_steps-no_max_step 0.5 "${EQUAL[@]}" method=fedbr method.fedbr.max_step=false seed=0..4
study fedbr-equal_steps-component_1 0.4 "${EQUAL[@]}" method=fedbr method.fedbr.mu=0 seed=0..4
study fedbr-equal_steps-component_2 0.5 "${EQUAL[@]}" method=fedbr method.fedbr.lam=0 seed=0..4
# The same with the paper's network, one split.
study fedbr-cnn_equal_steps 9.0 experiment=fedbr/rotated_mnist data.pool=2 data.rotation.test=spread local.lr=0.01 \
    rounds=100 method=fedavg,fedprox,moon,fedbr seed=0
# The paper's network on all pixels, with thirty times the paper's rate and a tenth of its rounds.
study fedbr-fast_steps 12.0 experiment=fedbr/rotated_mnist data.rotation.test=spread local.lr=0.03 rounds=100 \
    method=fedavg,fedbr seed=0
# Table 5: 100 clients on CIFAR10, 10 of them in each round, with a small network on 16 x 16 pixels.
study fedbr-100_clients 3.0 experiment=fedbr/cifar10_100_clients model=small_cnn data.pool=2 rounds=100 \
    method=fedavg,feddecorr,fedmix,fedprox,mixup,vhl,fedbr seed=0..2

# 2. FedBSS on Fashion-MNIST, alpha 0.1. With 14 x 14 pixels, a small network and a fifth of the data, 200 rounds are
# affordable.
FASHION=(experiment=fedbss/fashion_mnist partition.alpha=0.1)
study fedbss-small 1.4 "${FASHION[@]}" data.pool=2 model=small_cnn partition.fraction=0.2 \
    method=fedavg,fedlc,fedbss method.fedbss.kind=cosine,linear,filter seed=0..4
# The paper's network on all data. The warm-up is a quarter of the rounds, as in the paper (50 of 200).
study fedbss-paper 1.1 "${FASHION[@]}" method=fedavg,fedbss method.fedbss.warmup_rounds=20 rounds=80 seed=0
# Is FedAvg as steady as the paper's FedBSS, whose accuracy deviates by 0.16 points over the last ten rounds, with a more
# even split or with more clients per round?
DEVIATION=(experiment=fedbss/fashion_mnist data.pool=2 model=small_cnn partition.fraction=0.2 method=fedavg)
study fedbss-deviation-split 0.2 "${DEVIATION[@]}" partition.alpha=0.1,100.0 rounds=100 seed=0..2
study fedbss-deviation-cohort 0.1 "${DEVIATION[@]}" partition.alpha=0.1 rounds=30 schedule.cohort=100 seed=0

# The paper's setting, all of its 200 rounds, one seed.
study fedbss-200_rounds 5.0 "${FASHION[@]}" method=fedavg,fedbss seed=0
# The rate is raised until a fifth of the samples trains a small network, as for the noise below.
SKEW=(experiment=fedbss/fashion_mnist data.pool=2 model=small_cnn partition.fraction=0.2 local.lr=0.1 rounds=150)
for alpha in 0.1 0.3 0.5; do
    study "fedbss-skew_$alpha" 0.9 "${SKEW[@]}" "partition.alpha=$alpha" method=fedavg,fedbss \
        method.fedbss.kind=cosine,linear,filter method.fedbss.warmup_rounds=38 seed=0..4
done
study fedbss-skew_0.1-cda 2.0 "${SKEW[@]}" partition.alpha=0.1 method=fedavg,fedbss,fedlc,fedcda,fedcda+fedbss \
    method.fedbss.warmup_rounds=38 method.fedcda.warmup_rounds=38 seed=0..4

# 3. FRAug on Digits with scikit-learn's digits in place of SVHN. With ramp_rounds=300, the ramp of 100 rounds starts and ends
# at the values that it has with 300 rounds.
DIGITS=(experiment=fraug/digits 'data.domains=[mnist,mnist_m,usps,digits]' data.size=16 rounds=100)
study fraug 7.0 "${DIGITS[@]}" method=fedavg,fedbn,fraug method.fraug.ramp_rounds=300 \
    method.fraug.rtnet_lam=0.1,1.0,10.0 seed=0..2

# A tenth of the images; FRAug by the code and by the text of its paper.
study digits_tenth 4.0 "${DIGITS[@]}" partition.fraction=0.1 method=fedavg,fedbn,fraug method.fraug.ramp_rounds=300 \
    seed=0..4
study digits_tenth-text 1.5 "${DIGITS[@]/fraug\/digits/fraug/digits_text}" partition.fraction=0.1 method=fraug \
    method.fraug.ramp_rounds=300 seed=0..4

# 4. FedLD on chest X-rays and on a synthetic domain shift. The terms that its two parts should reduce must decrease.
PARTS=method=fedavg,fedprox,fedld_margin,fedld_principal,fedld
study fedld-chest 1.3 experiment=fedld/retina data=pneumonia_mnist model=small_cnn partition.alpha=0.5 rounds=100 \
    evaluate.decompose=5 $PARTS seed=0..4
# Ten more seeds; FedAvg with a larger server step is the control of the principal gradients, which make longer steps.
CHEST=(experiment=fedld/retina data=pneumonia_mnist model=small_cnn partition.alpha=0.5 rounds=100 evaluate.decompose=5)
study fedld-chest-more_seeds 2.0 "${CHEST[@]}" method=fedavg,fedld_principal,fedld seed=5..14
study fedld-chest-larger_step 0.8 "${CHEST[@]}" method=fedavgm method.fedavgm.server_lr=1.3 method.fedavgm.momentum=0.0 \
    seed=0..14
study fedld-shift 0.2 experiment=fedld/retina data=synthetic data.domains=5 data.shift=3 data.noise=3 \
    data.samples=2000 data.test_samples=2000 partition=domain model=small_cnn rounds=100 evaluate.decompose=5 \
    $PARTS seed=0..4

# 5. FedBR and FedBSS combined with other methods, at one setting each, without InCo, which needs a ResNet's equal blocks.
with() { # a method: list it alone and combined with each of the others
    echo "method=fedavg,$1,fedcm,$1+fedcm,feddecorr,$1+feddecorr,mixup,$1+mixup,fedexp,$1+fedexp"
}
study small-rotated_mnist-combinations 1.2 "${SMALL[@]}" "$(with fedbr)" seed=0..4
study fedbss-small-combinations 2.8 "${FASHION[@]}" data.pool=2 model=small_cnn partition.fraction=0.2 "$(with fedbss)" \
    seed=0..4

# 6. FedBSS with noisy labels (Table 2). The rate is raised until a fifth of the paper's samples train a small network.
NOISE=(experiment=fedbss/fashion_mnist partition=iid data.pool=2 model=small_cnn partition.fraction=0.2 local.lr=0.1)
for noise in 0.5 0.3 0.1; do
    study "fedbss-noise_$noise" 0.4 "${NOISE[@]}" "data.label_noise=$noise" method=fedavg,fedbss \
        method.fedbss.kind=cosine,linear,filter method.fedbss.warmup_rounds=15 rounds=60 seed=0..4
done

# 7. Compressors on W3's model and phones' uplinks: docs/studies/compression.md.
page compression 0.3 jobs.compression_study

# 8. Topologies: one server, edges, clusters, peers. It writes docs/studies/topology.md.
page topology 0.2 jobs.topology_study

# 9. A small GPT: full fine-tuning, DiLoCo and adapters, three seeds, in docs/studies/language.md. About three minutes for a run.
page language 1.8 jobs.language_study
