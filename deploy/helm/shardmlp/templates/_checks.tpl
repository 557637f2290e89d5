{{/* Values that can't start, or that open more than was asked for: all of it is said at once, before anything is there. */}}
{{- define "shardmlp.check" -}}
{{- $wrong := list -}}
{{- range list "shardmlp.wrongNames" "shardmlp.wrongModel" "shardmlp.wrongSecurity" "shardmlp.wrongFlags" -}}
{{- $wrong = concat $wrong (include . $ | fromJsonArray) -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n- %s" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end -}}

{{- define "shardmlp.wrongNames" -}}
{{- $wrong := list -}}
{{- $name := include "shardmlp.name" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- $wrong = append $wrong (printf
      "the release %s would have Services of the name %s: that has to begin with a letter, and to have a-z, 0-9 and - alone"
      .Release.Name $name) -}}
{{- end -}}
{{- range $key, $value := include "shardmlp.selector" . | fromYaml -}}
{{- if hasKey $.Values.podLabels $key -}}
{{- $wrong = append $wrong (printf "podLabels: %s is what the Services find the pods by" $key) -}}
{{- end -}}
{{- end -}}
{{- toJson $wrong -}}
{{- end -}}

{{- define "shardmlp.wrongModel" -}}
{{- $wrong := list -}}
{{- $layers := splitList "-" .Values.model.layers -}}
{{- if gt (int (first $layers)) (int (last $layers)) -}}
{{- $wrong = append $wrong (printf "model.layers: %s ends before it begins" .Values.model.layers) -}}
{{- end -}}
{{- if ge (int .Values.stashGiB) (int .Values.memory.planGiB) -}}
{{- $wrong = append $wrong (printf
      "stashGiB: %d is within memory.planGiB, %d, and leaves no room for the weights"
      (int .Values.stashGiB) (int .Values.memory.planGiB)) -}}
{{- end -}}
{{- toJson $wrong -}}
{{- end -}}

{{- define "shardmlp.wrongSecurity" -}}
{{- $wrong := list -}}
{{- if not .Values.tls.secretName -}}
{{- range list "clientCaSecretName" "replicaCaSecretName" -}}
{{- if index $.Values.tls . -}}
{{- $wrong = append $wrong (printf "tls.%s needs tls.secretName, the server's own certificate" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not .Values.insecure -}}
{{- with include "shardmlp.open" . | fromJsonArray -}}
{{- $wrong = append (concat $wrong .) "where that is meant, and the network keeps others out, ask for it: insecure: true" -}}
{{- end -}}
{{- end -}}
{{- toJson $wrong -}}
{{- end -}}

{{/* Of what the chart sets, extraFlags may have what nothing else goes by. */}}
{{- define "shardmlp.wrongFlags" -}}
{{- $wrong := list -}}
{{- $own := list
      "model" "layers" "dtype" "frozen" "listen" "metrics-address" "health-listen" "insecure-listen-anywhere"
      "tls-cert" "tls-key" "tls-client-ca" "replica-ca" "token-file" "device" "threads" "memory-bytes"
      "stash-bytes" "checkpoint-dir" "drain-checkpoint" "drain-timeout" "replicas" "rank" "coordinator"
      "on-loss" "replica-start-timeout" "log-level" "check-config" "help" -}}
{{- range .Values.extraFlags -}}
{{- $flag := regexFind "[a-z0-9-]+" (trimPrefix "--" .) -}}
{{- if has $flag $own -}}
{{- $wrong = append $wrong (printf "extraFlags: --%s is the chart's to set, by the value for it" $flag) -}}
{{- end -}}
{{- end -}}
{{- toJson $wrong -}}
{{- end -}}
