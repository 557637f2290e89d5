{{/* Short enough for "-peers" behind it, and for what a StatefulSet appends. */}}
{{- define "shardmlp.name" -}}
{{- if contains "shardmlp" .Release.Name -}}
{{- .Release.Name | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-shardmlp" .Release.Name | trunc 46 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "shardmlp.selector" -}}
app.kubernetes.io/name: shardmlp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "shardmlp.labels" -}}
{{ include "shardmlp.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "shardmlp.image" -}}
{{- $suffix := ternary "-cuda" "" .Values.gpu.enabled -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "%s%s" .Chart.AppVersion $suffix)) -}}
{{- end -}}

{{/* "true" where the pods are replicas of each other, and where they keep checkpoints. */}}
{{- define "shardmlp.synced" -}}
{{- if and (gt (int .Values.replicas) 1) (not .Values.model.frozen) -}}true{{- end -}}
{{- end -}}
{{- define "shardmlp.keeps" -}}
{{- if and .Values.checkpoints.enabled (not .Values.model.frozen) -}}true{{- end -}}
{{- end -}}

{{/* The name by which a pod knows itself without a name server: it is in its /etc/hosts. */}}
{{- define "shardmlp.coordinator" -}}
{{- $name := include "shardmlp.name" . -}}
{{- printf "%s-0.%s-peers.%s.svc.%s:50050" $name $name .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{- define "shardmlp.graceSeconds" -}}
{{- $s := .Values.seconds -}}
{{- $checkpoint := ternary (int $s.drainCheckpoint) 0 (eq "true" (include "shardmlp.keeps" .)) -}}
{{- add (int $s.preStop) (int $s.drain) $checkpoint (int $s.exit) -}}
{{- end -}}

{{/* The Secret of each volume, and the file in it that each flag names. */}}
{{- define "shardmlp.secrets" -}}
{{- with .Values.tls.secretName }}
tls: {{ . }}
{{- end }}
{{- with .Values.tls.clientCaSecretName }}
client-ca: {{ . }}
{{- end }}
{{- if and .Values.tls.replicaCaSecretName (include "shardmlp.synced" .) }}
replica-ca: {{ .Values.tls.replicaCaSecretName }}
{{- end }}
{{- with .Values.tokenSecretName }}
token: {{ . }}
{{- end }}
{{- end -}}
{{- define "shardmlp.secretFiles" -}}
{{- $secrets := include "shardmlp.secrets" . | fromYaml -}}
{{- if hasKey $secrets "tls" }}
--tls-cert: /secrets/tls/tls.crt
--tls-key: /secrets/tls/tls.key
{{- end }}
{{- if hasKey $secrets "client-ca" }}
--tls-client-ca: /secrets/client-ca/ca.crt
{{- end }}
{{- if hasKey $secrets "replica-ca" }}
--replica-ca: /secrets/replica-ca/ca.crt
{{- end }}
{{- if hasKey $secrets "token" }}
--token-file: /secrets/token/token
{{- end }}
{{- end -}}
{{/* What others can read, or take part in, a sentence each. */}}
{{- define "shardmlp.open" -}}
{{- $open := list -}}
{{- if not .Values.tls.secretName -}}
{{- $open = append $open "without tls.secretName whoever sees the network reads and changes what trainers send, tokens too" -}}
{{- end -}}
{{- if not (or .Values.tls.clientCaSecretName .Values.tokenSecretName) -}}
{{- $open = append $open "without tls.clientCaSecretName or tokenSecretName whoever reaches the server changes the weights" -}}
{{- end -}}
{{- if and (include "shardmlp.synced" .) (not .Values.tls.replicaCaSecretName) -}}
{{- $open = append $open "without tls.replicaCaSecretName whoever reaches the replicas can take part as one" -}}
{{- end -}}
{{- toJson $open -}}
{{- end -}}
{{/* Probes know no TLS. */}}
{{- define "shardmlp.healthPort" -}}
{{- ternary "50052" "50051" (ne "" .Values.tls.secretName) -}}
{{- end -}}

{{/* The rules of deploy/prometheus. Alerts wait as long as they are told to; for replicas, as a start may take. */}}
{{- define "shardmlp.rules" -}}
{{- $rules := .Files.Get "files/shardmlp.rules.yaml" | fromYaml -}}
{{- $start := add (int .Values.seconds.load) (int .Values.seconds.replicaStart) -}}
{{- $times := merge (dict) .Values.prometheusRule.for (dict "ShardmlpReplicaMissing" (printf "%ds" $start)) -}}
{{- $known := list -}}
{{- range $group := $rules.groups -}}
{{- range $rule := $group.rules -}}
{{- if hasKey $rule "alert" -}}
{{- $known = append $known $rule.alert -}}
{{- with get $times $rule.alert }}{{ $_ := set $rule "for" . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $alert, $time := $times -}}
{{- if not (has $alert $known) -}}
{{- fail (printf "prometheusRule.for: there is no alert %s, expected one of %s" $alert (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{- define "shardmlp.flags" -}}
- --model=/model
- --dtype={{ .Values.model.dtype }}
{{- with .Values.model.layers }}
- --layers={{ . }}
{{- end }}
{{- if .Values.model.frozen }}
- --frozen
{{- end }}
- --listen=0.0.0.0:50051
- --metrics-address=0.0.0.0:9464
{{- if include "shardmlp.open" . | fromJsonArray }}
- --insecure-listen-anywhere
{{- end }}
{{- range $flag, $file := include "shardmlp.secretFiles" . | fromYaml }}
- {{ $flag }}={{ $file }}
{{- end }}
{{- if .Values.tls.secretName }}
- --health-listen=0.0.0.0:50052
{{- end }}
- --device={{ ternary "cuda" "cpu" .Values.gpu.enabled }}
- --threads={{ .Values.cpus }}
- --memory-bytes={{ .Values.memory.planGiB }}GiB
{{- if .Values.stashGiB }}
- --stash-bytes={{ .Values.stashGiB }}GiB
{{- end }}
{{- if include "shardmlp.keeps" . }}
- --checkpoint-dir=/checkpoints
- --restore=latest
- --drain-checkpoint=drain
{{- end }}
- --drain-timeout={{ .Values.seconds.drain }}s
{{- if include "shardmlp.synced" . }}
- --replicas={{ .Values.replicas }}
- --rank=pod
- --coordinator={{ include "shardmlp.coordinator" . }}
- --on-loss={{ .Values.onLoss }}
- --replica-start-timeout={{ .Values.seconds.replicaStart }}s
{{- end }}
- --log-format=json
- --log-level={{ .Values.logLevel }}
{{- range .Values.extraFlags }}
- {{ . | quote }}
{{- end }}
{{- end -}}
